"""The shell lets the core decide once for many events, and learners may come and go while a version is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from builders import asking, make_settings
from diloco_common.codec import encode_payload
from diloco_common.errors import NotFinite
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.ports import Clock
from diloco_common.settings import Settings
from diloco_common.wire.manifest import TensorSpec
from diloco_common.wire.messages import Outcome, Progress, PushHeader
from diloco_server.core import arithmetic
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.effects import MergeRound
from diloco_server.core.fragment import FragmentState, Phase, Restored
from diloco_server.core.shard import Shard
from diloco_server.shell.host import AwakeClock, ShardHost
from diloco_server.shell.server import real_world
from diloco_server.storage.store import MemoryStore, Store
from waiting import until_async

EPOCH = 1


def make_host(
    clock: Clock = lambda: 0.0, store: Store | None = None, give_back: Callable[[], None] = lambda: None
) -> ShardHost:
    log, world = Log("shard-0"), replace(real_world(), give_back=give_back)
    return ShardHost(Settings(), store or MemoryStore(EPOCH), world, metrics=ShardMetrics(), log=log, clock=clock)


class CountingClock:
    """The core is given the time once per decision, and nobody else asks here."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return 0.0


async def test_events_that_come_together_are_decided_on_once_and_soon() -> None:
    clock = CountingClock()
    host = make_host(clock)
    counts, begun = [], clock.asked
    for _ in range(2):
        for _ in range(1000):
            host.advance_later()
        counts.append(clock.asked - begun)
        await until_async(lambda: clock.asked - begun > counts[-1], "a decision")
        counts.append(clock.asked - begun)
    host.close()
    assert counts == [0, 1, 1, 2]


async def test_a_merge_that_fails_half_way_ends_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values in memory are of no version then; those on disk are whole."""

    def fails(*_: object, **__: object) -> None:
        raise NotFinite("element 0 of 4 is inf")

    monkeypatch.setattr(arithmetic, "step", fails)
    host = make_host()
    seeded(host)
    host.driver.carry_out(MergeRound(0, 1, ()))
    await host.work.broken.wait()
    host.close()
    assert host.ready() == (False, "version 1 of fragment 0 cannot be made: element 0 of 4 is inf")


async def test_a_shard_for_which_time_stops_ends(monkeypatch, caplog) -> None:
    """Else it would serve on, and no lease would end."""

    def fails() -> None:
        raise AssertionError("two rounds of one fragment")

    host = make_host()
    monkeypatch.setattr(host.shard, "send_pulses", fails)
    ticking = asyncio.create_task(host.run())
    await host.work.broken.wait()
    await ticking
    host.close()
    why = "time has stopped for the shard: AssertionError('two rounds of one fragment')"
    assert host.ready() == (False, why)
    assert [record.exc_info is not None for record in caplog.records if "time has stopped" in record.message] == [True]


def seeded(host: ShardHost) -> FragmentState:
    """Give the shard a model of one fragment with values."""
    host.shard.join("ann", asking([TensorSpec("w", (4,))]), 0.0)
    state = host.shard.fragments[0]
    state.values = arithmetic.Values(torch.zeros(4), [torch.zeros(4)])
    return state


@pytest.mark.parametrize(
    ("asked_at", "shown"),
    [
        ([100.0, 100.02, 100.04], [100.0, 100.02, 100.04]),
        ([100.0, 101.0, 102.0], [100.0, 101.0, 102.0]),
        ([100.0, 110.0, 110.5], [100.0, 101.0, 101.5]),
        ([100.0, 110.0, 120.0], [100.0, 101.0, 102.0]),
    ],
    ids=["awake", "slow", "frozen once", "frozen twice"],
)
def test_time_stands_still_while_nobody_looks(asked_at, shown) -> None:
    times = iter([100.0, *asked_at])
    clock = AwakeClock(1.0, lambda: next(times))
    assert [clock() for _ in asked_at] == pytest.approx(shown)


SIZE = 8
MODEL = [TensorSpec("w", (SIZE,))]
PAYLOAD = encode_payload(torch.ones(SIZE), "float32")
VALUES = Values(torch.zeros(SIZE), [])
PUBLISHED = Published(encode_payload(torch.zeros(SIZE), "float32"))


def make_shard(epoch: int = 1) -> Shard:
    """K = 1, H = 1, and two learners that are gone are remembered."""
    sync = {"sync_every": 1, "quorum": 1}
    return Shard(make_settings(sync=sync, shard={"max_learners": 2}), epoch)


class Writing:
    """A shard whose version 1 is being written. Process 1 of ann contributed to it."""

    def __init__(self) -> None:
        self.shard = make_shard()
        self.now = 0.0
        self.join("ann", "process 1")
        self.push(0)
        self.shard.versions.seeded(self.shard.versions.seed_record(0), VALUES, PUBLISHED)
        self.contribute(1)
        self.begin_writing()

    def begin_writing(self) -> None:
        assert self.shard.fragments[0].phase is Phase.MERGING
        self.record = self.shard.versions.next_record(0)
        self.on_disk = deepcopy(self.record)

    def join(self, learner_id: str, process_id: str) -> None:
        self.now += 1.0
        self.member = self.shard.join(learner_id, asking(MODEL, process_id), self.now)
        self.shard.tick(self.now)

    def leave(self) -> None:
        self.shard.leave(self.member)
        self.shard.tick(self.now)

    def contribute(self, round_number: int) -> None:
        """ann takes a step, is asked, and contributes."""
        for step in (0, 1):
            self.shard.progress(self.member, Progress(step + round_number, 10), self.now)
        self.shard.tick(self.now)
        self.push(round_number)

    def push(self, round_number: int) -> None:
        base = max(0, round_number - 1)
        header = PushHeader(0, round_number, 1, base, 10, 1, PAYLOAD.header, self.shard.manifest.digest)
        assert self.shard.taking.contribute(self.member, header, PAYLOAD, (1.0,), self.now).outcome is Outcome.ACCEPTED
        self.shard.tick(self.now)

    def forget_ann(self) -> None:
        """She leaves, and so many learners come and go that nobody remembers her."""
        self.leave()
        for other in ("ben", "cat"):
            self.join(other, f"process of {other}")
            self.leave()
        assert self.shard.membership.get("ann") is None

    def committed(self) -> Shard:
        self.shard.committed(self.record, PUBLISHED, self.now)
        return self.shard

    def restarted(self) -> Shard:
        assert self.shard.manifest is not None
        shard = make_shard(epoch=2)
        shard.versions.restore(self.shard.manifest, [Restored(self.on_disk, VALUES, PUBLISHED, is_new_line=False)])
        return shard


def known(shard: Shard) -> tuple[int, int]:
    """What is said under ann's id: the version that she is in, and up to which one that is not known."""
    (status,) = shard.join_answer("ann").fragments
    return status.merged_version, status.forgotten_version


MERGED, NOT_KNOWN = (1, 0), (0, 1)


AGAIN, REPLACED = ("join", "ann", "process 1"), ("join", "ann", "process 2")


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        ([], MERGED),
        ([("leave",)], MERGED),
        ([("forget_ann",)], MERGED),  # the record knows her, and no other process has her id
        ([AGAIN], MERGED),
        ([REPLACED], NOT_KNOWN),
        ([REPLACED, ("leave",)], NOT_KNOWN),
        ([("forget_ann",), AGAIN], MERGED),
        ([("forget_ann",), REPLACED], NOT_KNOWN),
    ],
    ids=lambda steps: " ".join(step[-1] for step in steps) if isinstance(steps, list) else None,
)
def test_who_is_in_a_version_is_right_whatever_happens_while_it_is_written(
    happens: list[tuple[str, ...]], told: tuple[int, int]
) -> None:
    """What process 1 contributed is in the version. Another process under the same id has nothing in it."""
    writing = Writing()
    for what, *who in happens:
        getattr(writing, what)(*who)
    assert known(writing.committed()) == told
    assert writing.record == writing.on_disk, "what is being written must not change"

    again = writing.restarted()
    assert known(again) == MERGED
    again.join("ann", asking(MODEL, "process 2"), 0.0)
    assert known(again) == NOT_KNOWN


@pytest.mark.parametrize(("process_id", "told"), [("process 1", (1, 0)), ("process 2", (0, 1))])
def test_an_earlier_merge_is_right_too_while_the_next_version_is_written(process_id, told) -> None:
    """ann is in version 1 and has no part in version 2."""
    writing = Writing()
    writing.committed()
    writing.leave()
    writing.join("ben", "process of ben")
    writing.contribute(2)
    writing.begin_writing()
    writing.join("ann", process_id)
    assert known(writing.shard) == told

    assert known(writing.committed()) == told
    assert known(writing.restarted()) == (1, 0)
