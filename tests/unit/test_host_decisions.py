"""The shell lets the core decide once for many events: a decision for each would cost the square of the learners."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from builders import asking
from diloco_common.errors import NotFinite
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.ports import Clock
from diloco_common.settings import Settings
from diloco_common.wire.manifest import TensorSpec
from diloco_server.core import arithmetic
from diloco_server.core.effects import MergeRound
from diloco_server.core.fragment import FragmentState
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
