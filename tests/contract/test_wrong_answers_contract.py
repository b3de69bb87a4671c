"""What gRPC makes of a shard that answers anything: each call of a learner ends in an error that it knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import torch

from diloco_common.codec import encode_payload
from diloco_common.errors import BadRequest, DilocoError, Refusal, Unavailable
from diloco_common.trust.identity import Identity
from diloco_common.wire.grpc_transport import GrpcTransport
from diloco_common.wire.messages import PROTOCOL, JoinRequest, PullRequest, PushHeader

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
