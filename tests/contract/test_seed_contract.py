"""Learners that start together all offer the whole model: a shard takes a few seeds at a time, each fragment once."""

from __future__ import annotations

from typing import Any

import grpc
import torch
from in_process import CHUNK_ELEMENTS, Caller, InProcessShard, refusal, settings_with

from builders import chunk_request
from diloco_common.codec import encode_payload
from diloco_common.errors import Busy
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_common.wire.messages import PushHeader
from diloco_protos import parameter_server_pb2 as pb
from diloco_server.shell.service import SEEDS_AT_ONCE
from waiting import until

FRAGMENTS = SEEDS_AT_ONCE + 1
MODEL = (TensorSpec("weight", (FRAGMENTS, 5 * CHUNK_ELEMENTS)),)
"""Five chunks in each fragment."""


def joined(shard: InProcessShard, learner_id: str) -> Caller:
    caller = shard.caller(learner_id)
    caller.manifest = cut(MODEL, FRAGMENTS, 1)
    caller.join(MODEL)
    return caller


def seed_of(caller: Caller, fragment_id: int) -> tuple[PushHeader, list[pb.PushRequest]]:
    """The header of a seed, and all messages of its push."""
    num_elements = caller.manifest.fragments[fragment_id].num_elements
    payload = encode_payload(torch.ones(num_elements), "float32", chunk_elements=CHUNK_ELEMENTS)
    header = caller.header(payload, fragment_id=fragment_id, round=0, tokens=0, steps=0)
    first = pb.PushRequest(header=protobuf.push_header_to_pb(header))
    return header, [first, *(chunk_request(chunk) for chunk in payload.chunks)]


def begin(caller: Caller, fragment_id: int) -> Any:
    """A push of a seed that stays open; returns once its first chunk has come in."""
    observer = caller.shard.server.host.telemetry
    before = observer.bytes_pushed
    _, messages = seed_of(caller, fragment_id)

    async def open_push() -> Any:
        call = caller.stub.Push(metadata=caller.metadata())
        for message in messages[:2]:
            await call.write(message)
        return call

    call = caller.loop.run(open_push())
    until(lambda: observer.bytes_pushed > before, "the first chunk")
    return call


def is_busy(caller: Caller, fragment_id: int) -> bool:
    """Whether a seed of this fragment is refused for now."""
    _, messages = seed_of(caller, fragment_id)
    found = refusal(lambda: caller.push_messages(messages[:1], hold=True))
    return (found.status, found.code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUSY")


def test_a_fragment_is_taken_from_one_learner_at_a_time_and_from_the_next_if_that_one_breaks_off(serve) -> None:
    shard = serve(settings_with(sync={"fragments": FRAGMENTS}))
    a, b = (joined(shard, learner_id) for learner_id in "ab")
    slow = begin(a, 0)
    assert is_busy(b, 0)

    a.loop.look(slow.cancel)

    _, messages = seed_of(b, 0)
    until(lambda: accepted(b, messages), "b's seed to be taken")
    until(lambda: shard.core.fragments[0].seeded, "version 0")


def test_only_a_few_seeds_come_in_at_once(serve) -> None:
    shard = serve(settings_with(sync={"fragments": FRAGMENTS}))
    a, b = (joined(shard, learner_id) for learner_id in "ab")
    begun = [begin(a, fragment_id) for fragment_id in range(SEEDS_AT_ONCE)]

    assert is_busy(b, SEEDS_AT_ONCE)

    for call in begun:
        a.loop.look(call.cancel)
    _, messages = seed_of(b, SEEDS_AT_ONCE)
    until(lambda: accepted(b, messages), "a place to be free")


def accepted(caller: Caller, messages: list[pb.PushRequest]) -> bool:
    """Whether a seed is taken; if not, the shard is busy with one that it has not missed yet."""
    try:
        return bool(caller.push_messages(messages).outcome == pb.PushResponse.ACCEPTED)
    except grpc.aio.AioRpcError as error:
        if isinstance(rpc.refusal_of(error), Busy):
            return False
        raise
