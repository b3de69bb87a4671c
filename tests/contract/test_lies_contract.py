"""A caller with every right to call, and nothing true to say, beside a learner that trains (security.md).

Whatever is sent, the answer has a stable code, no traceback is logged, and the honest learner's work goes on. How much
lies count for is in unit/test_influence.py, other models are in unit/test_shard.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from in_process import TENSORS, Attendance, Caller, Clock, InProcessShard, contribution, refusal, settings_with

from diloco_common.errors import WORDS_MAX
from diloco_common.wire import bounds, protobuf, rpc
from diloco_common.wire.manifest import TensorSpec
from diloco_common.wire.messages import PROTOCOL, Progress
from diloco_protos import parameter_server_pb2 as pb
from waiting import DEADLINE_S, until

ACCEPTED = pb.PushResponse.ACCEPTED
Serve = Callable[..., InProcessShard]
TOKENS = 100
"""Of each step."""


class Honest:
    """A learner that takes a step per second of the test's clock, and contributes whenever it is asked."""

    def __init__(self, shard: InProcessShard, clock: Clock) -> None:
        self.shard, self.clock = shard, clock
        self.caller = shard.caller("honest")
        self.caller.join()
        self.caller.seed()
        self.stream: Attendance = self.caller.attend()
        self.steps = self.merged_until = 0
        self.report()

    def report(self) -> None:
        told = protobuf.progress_to_pb(Progress(self.steps, TOKENS * self.steps, 2.5, 1.0))
        self.shard.loop.run(self.stream.call.write(told))
        until(lambda: self.seen() == self.steps, "the report")

    def seen(self) -> int | None:
        member = self.shard.core.membership.get("honest")
        return member.progress.inner_step if member is not None and member.reports is not None else None

    def step(self) -> None:
        self.clock.now += 1.0
        self.steps += 1
        self.report()
        state = self.shard.core.fragments[0]
        until(lambda: not state.computing, "the version")
        if self.shard.loop.look(lambda: state.round is not None and "honest" in state.round.missing):
            self.contribute()

    def contribute(self) -> None:
        state, payload = self.shard.core.fragments[0], contribution(0.001)
        version = self.shard.version()
        header = self.caller.header(
            payload, round=version + 1, base_version=version, tokens=TOKENS * (self.steps - self.merged_until),
            steps=self.steps - self.merged_until,
        )  # fmt: skip
        assert self.caller.push(header, payload).outcome == ACCEPTED
        self.merged_until = self.steps
        until(lambda: state.version == version + 1, "a version")


def lively(serve: Serve, clock: Clock, **sections: Any) -> tuple[InProcessShard, Honest]:
    """A shard with one honest learner in its ordinary course: H is 4 steps."""
    sync, lease = {"quorum": 1, "sync_every": 4}, {"lease_s": 1000.0, "heartbeat_s": 100.0}
    shard = serve(settings_with(sync=sync, lease=lease, **sections), clock)
    honest = Honest(shard, clock)
    while shard.version() < 2:  # a loaded machine counts steps later
        assert honest.steps < 100
        honest.step()
    return shard, honest


def mallory(shard: InProcessShard, name: str = "mallory") -> Caller:
    caller = shard.caller(name)
    caller.join()
    return caller


def raw(caller: Caller, method: str, *bodies: bytes) -> None:
    """A call with these messages, whatever they are; to its end. Raises AioRpcError."""

    async def call() -> None:
        made = caller.channel.stream_stream(f"/diloco.v1.ParameterServer/{method}")(
            metadata=caller.metadata(), timeout=DEADLINE_S
        )
        try:
            for body in bodies:
                await made.write(body)
            await made.done_writing()
        except Exception:  # answered already: reading says how
            pass
        while await made.read() is not rpc.EOF:
            pass
        if await made.code() != grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                await made.code(), await made.initial_metadata(), await made.trailing_metadata(),
                details=await made.details(),
            )  # fmt: skip

    caller.loop.run(call())


@pytest.mark.parametrize("tokens", [2**64 - 1, 2**62, bounds.TOKENS_MAX + 1])
def test_a_push_of_more_tokens_than_there_are_is_no_push(serve: Serve, clock: Clock, tokens: int) -> None:
    shard, honest = lively(serve, clock, run={"tokens": 10**6})
    caller, payload, before = mallory(shard), contribution(), shard.state()

    found = refusal(lambda: caller.push(caller.header(payload, tokens=tokens), payload))

    assert (found.code, f"PushHeader.tokens is {tokens}" in found.words) == ("BAD_REQUEST", True)
    assert shard.state() == before
    assert not shard.core.done
    honest.step()
    assert mallory(shard).identity.generation > 0, "Join is still answered"


def test_counters_stop_before_they_could_not_be_sent(serve: Serve, clock: Clock) -> None:
    shard = serve(settings_with(lease={"lease_s": 1000.0, "heartbeat_s": 100.0}), clock)
    caller = mallory(shard, "honest")
    payload = contribution(0.5, "float32")
    header = caller.header(
        payload, round=0, tokens=0, steps=0, tokens_merged=bounds.TOKENS_COUNTED_MAX, epoch=shard.core.epoch
    )
    assert caller.push(header, payload).outcome == ACCEPTED
    until(lambda: shard.core.versions.all_seeded, "the seed")
    stream = caller.attend()
    for step in (0, 1):
        stream.say(step, tokens=TOKENS * step)
    until(lambda: shard.core.fragments[0].round is not None, "a round")
    assert caller.push(caller.header(contribution()), contribution()).outcome == ACCEPTED
    until(lambda: shard.version() == 1, "version 1")

    answer = shard.caller("next").join()

    assert answer.pulse.tokens_merged == bounds.TOKENS_COUNTED_MAX
    assert caller.pull()[0].tokens_merged == bounds.TOKENS_COUNTED_MAX


WIDE: list[tuple[str, Callable[[pb.JoinRequest], object], str]] = [
    ("200,000 held", lambda r: r.held.extend([pb.Held(fragment_id=1)] * 200_000), "too many entries"),
    ("one held twice", lambda r: r.held.extend([pb.Held(fragment_id=1)] * 2), "names a fragment twice"),
    ("a million tensors", lambda r: r.tensors.extend([pb.Tensor(name="w", shape=[1])] * 10**6), "JoinRequest"),
    ("20,000 dimensions", lambda r: r.tensors.append(pb.Tensor(name="w", shape=[1] * 20_000)), "has 20000 entries"),
    ("a long name", lambda r: r.tensors.append(pb.Tensor(name="w" * 10**3, shape=[1])), "has 1000 characters"),
]


@pytest.mark.parametrize(("change", "words"), [(c, w) for _, c, w in WIDE], ids=[name for name, _, _ in WIDE])
def test_a_join_beyond_all_measure_is_refused(
    serve: Serve, clock: Clock, change: Callable[[pb.JoinRequest], object], words: str
) -> None:
    shard = serve(settings_with(), clock)
    request = pb.JoinRequest(protocol=PROTOCOL, process_id="p", tensors=protobuf.tensors_to_pb(TENSORS))
    change(request)
    caller = shard.caller("mallory")

    found = refusal(lambda: raw(caller, "Join", request.SerializeToString()))

    assert (found.code, words in found.words) == ("BAD_REQUEST", True), found.words
    assert len(found.words.encode()) <= WORDS_MAX
    assert shard.core.manifest is None
    assert mallory(shard, "honest").identity.generation == 1


def test_companions_of_no_parameter_are_refused(serve: Serve, clock: Clock) -> None:
    """Else whoever comes first may add as many bytes to everyone's rounds as it likes."""
    shard = serve(settings_with(), clock)
    stray = TensorSpec("momentum of layer.bias (Adam)", (2**20, 2**10), rule="mean", kind="momentum")
    assert refusal(lambda: shard.caller("mallory").join([*TENSORS, stray])).code == "BAD_REQUEST"
    mallory(shard, "honest").seed()
