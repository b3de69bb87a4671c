"""A front of a real shard that fails on demand, as a network or a frozen process would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from in_process import InProcessShard

from diloco_common.errors import LeaseExpired
from diloco_common.trust.identity import Identity
from diloco_common.wire import rpc
from diloco_protos import parameter_server_pb2 as pb
from diloco_server.shell.access import Callers
from diloco_server.shell.servicer import Messages, ParameterServicer


class Front(ParameterServicer):
    """Serves the shard on another port. Its switches belong to the test, which sets them between calls."""

    def __init__(self, shard: InProcessShard) -> None:
        host = shard.server.host
        super().__init__(shard.server.service, shard.settings.run.id, Callers(time.time), host.telemetry.call_refused)
        self.loop = shard.loop
        self.address = ""
        self.frozen = False
        """Control streams are accepted, and nothing is said on them."""
        self.deaf = False
        """What learners report is lost."""
        self.acks_to_lose = 0
        """Answers to pushes that get lost from now on."""
        self.refuse_join = False
        """Join fails as if nobody was there."""
        self.cut_attend = False
        """Control streams break before the first word."""
        self.refuse_attend = False
        """Control streams are refused, as if the lease was over."""
        self.joins: list[float] = []
        """When Join was called, seconds."""
        self.attends: list[float] = []

    @asynccontextmanager
    async def admitted(self, context: Any, *calls: str, **first: Any) -> AsyncIterator[Identity]:
        await self._fail_before(calls[0], context)
        async with super().admitted(context, *calls, **first) as caller:
            yield caller
        if calls[0] == "Push" and self.acks_to_lose > 0:
            self.acks_to_lose -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer got lost")

    async def _fail_before(self, call: str, context: Any) -> None:
        if call == "Join":
            self.joins.append(time.monotonic())
            if self.refuse_join:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody is there")
        if call == "Attend":
            self.attends.append(time.monotonic())
            if self.cut_attend:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut off")
            if self.refuse_attend:
                await rpc.refuse(context, LeaseExpired("the lease is over; join again"))

    async def Attend(self, caller: Identity, requests: Messages, context: Any) -> AsyncGenerator[pb.Directive, None]:
        async for directive in super().Attend(caller, self._heard(requests), context):
            while self.frozen:  # noqa: ASYNC110 - a switch
                await asyncio.sleep(0.01)
            yield directive

    async def _heard(self, requests: Messages) -> Messages:
        async for request in requests:
            if not self.deaf:
                yield request

    async def start(self) -> None:
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self.handler(),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        self.frozen = False
        await self._server.stop(grace=0)
