"""A burst of calls waits for the event loop; gRPC cancels none of them."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc

from diloco_common.wire import rpc

CONNECTIONS = 16
CALLS = 120
"""On each connection: together more than gRPC's own limit, where it begins to cancel calls by chance."""


async def _burst() -> Counter[grpc.StatusCode]:
    async def answer(request: bytes, context: object) -> bytes:
        return b""

    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    methods = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("burst", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", rpc.BULK_CHANNEL_OPTIONS) for _ in range(CONNECTIONS)]
    try:
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        calls = [channel.unary_unary("/burst/Call")(b"", timeout=60.0) for channel in channels for _ in range(CALLS)]
        return Counter(await asyncio.gather(*(call.code() for call in calls)))
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
        await server.stop(0)


def test_no_call_of_a_burst_is_cancelled() -> None:
    assert asyncio.run(_burst()) == {grpc.StatusCode.OK: CONNECTIONS * CALLS}
