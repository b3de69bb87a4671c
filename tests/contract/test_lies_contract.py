"""A caller, or a shard, with every right to call and nothing true to say (security.md).

Whatever is sent, the answer has a stable code, and others are answered as before. How much lies count for is in
unit/test_influence.py, other models are in unit/test_shard.py, pushes of wrong numbers in test_push_contract.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import torch
from in_process import TENSORS, Caller, Clock, InProcessShard, contribution, refusal, settings_with

from diloco_common.codec import encode_payload
from diloco_common.errors import WORDS_MAX, BadRequest, DilocoError, Refusal, Unavailable
from diloco_common.trust.identity import Identity
from diloco_common.wire import bounds, protobuf, rpc
from diloco_common.wire.grpc_transport import GrpcTransport
from diloco_common.wire.manifest import TensorSpec
from diloco_common.wire.messages import PROTOCOL, JoinRequest, PullRequest, PushHeader
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


ME = Identity("local", "cat", 1, 1)
GARBAGE = b"\xff\xff\xff\xff"


class Anything(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, *messages: bytes, code: grpc.StatusCode | None = None, metadata: Any = ()) -> None:
        self._messages, self._code, self._metadata = messages, code, metadata

    def service(self, details: Any) -> Any:
        async def answer(requests: Any, context: Any) -> AsyncIterator[bytes]:
            for message in self._messages:
                yield message
            if self._code is not None:
                await context.abort(self._code, "\x1b[2J no", self._metadata)

        return grpc.stream_stream_rpc_method_handler(answer)


@pytest.mark.parametrize("call", ["join", "hear", "push", "pull"])
@pytest.mark.parametrize(
    ("shard", "error"),
    [
        (Anything(GARBAGE), BadRequest),
        (Anything(b"\xff" * (9 << 20)), Unavailable),
        (Anything(code=grpc.StatusCode.CANCELLED), Unavailable),
        (Anything(code=grpc.StatusCode.UNKNOWN), Unavailable),
        (Anything(code=grpc.StatusCode.UNKNOWN, metadata=(("diloco-code", "A" * 3000),)), Refusal),
        (Anything(), BadRequest),
    ],
    ids=["garbage", "too much", "cancelled", "unknown", "a code that is none", "nothing"],
)
async def test_whatever_a_shard_answers_is_an_error_that_a_learner_knows(
    shard: Anything, error: type[DilocoError], call: str
) -> None:
    server = grpc.aio.server(handlers=[shard], options=[("grpc.max_send_message_length", -1)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    transport = GrpcTransport(f"127.0.0.1:{port}")
    try:
        said = await asyncio.wait_for(_called(transport, call), 20.0)
    except DilocoError as caught:
        said = caught
    finally:
        await transport.close(0)
        await server.stop(0)
    is_end_of_stream = said is None and call in ("hear", "pull")
    assert isinstance(said, error) or is_end_of_stream
    assert str(said).isprintable() or not isinstance(said, Refusal)


async def _called(transport: GrpcTransport, call: str) -> Any:
    match call:
        case "join":
            return await transport.join(ME, JoinRequest(PROTOCOL, "process", (), ()), 10.0)
        case "hear":
            return await transport.attend(ME).hear()
        case "push":
            payload = encode_payload(torch.zeros(8), "float32")
            return await transport.push(ME, PushHeader(0, 1, 1, 0, 1, 1, payload.header, "digest"), payload, 10.0)
        case _:
            return await anext(transport.pull(ME, PullRequest(0, ("bfloat16",)), 10.0), None)
