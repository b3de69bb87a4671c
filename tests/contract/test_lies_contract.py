"""A caller with every right to call, and nothing true to say (security.md).

Whatever is sent, the answer has a stable code, and others are answered as before. How much lies count for is in
unit/test_influence.py, other models are in unit/test_shard.py, pushes of wrong numbers in test_push_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from in_process import TENSORS, Caller, Clock, InProcessShard, contribution, refusal, settings_with

from diloco_common.errors import WORDS_MAX
from diloco_common.wire import bounds, protobuf, rpc
from diloco_common.wire.manifest import TensorSpec
from diloco_common.wire.messages import PROTOCOL
from diloco_protos import parameter_server_pb2 as pb
from waiting import DEADLINE_S, until

ACCEPTED = pb.PushResponse.ACCEPTED
Serve = Callable[..., InProcessShard]
TOKENS = 100
"""Of each step."""


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
    ("a long name", lambda r: r.tensors.append(pb.Tensor(name="w" * 10**3, shape=[1])), "has 1000 characters"),
]
"""One of what is counted before it is parsed, and one of what is looked at after that; all: unit/test_bounds.py."""


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
