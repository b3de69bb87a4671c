"""Two more gRPC services of a shard: its health, and a speed test of the connection.

grpc.health.v1 has Check and Watch. Probes of an orchestrator carry no token, so none is required; over TLS the
connection's certificate must be valid. Messages are read like those of any caller without a lease: few at once, with a
deadline (`waits.Bodies`). Their places are separate from those of Join, so that a crowd there does not make a shard
look unhealthy.

diloco.v1.Probe lets anyone who may read the model measure the connection to this shard. It is bounded like every other
call: the caller is known before its bytes are taken; one open probe per account and two in all; at most 4 MiB and 2
seconds each, and one per 5 seconds in the long run. The bytes are dropped message by message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from diloco_common.errors import BadRequest, Busy, Refusal
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.messages import PROBE_BYTES_MAX, PROBE_MESSAGE_BYTES, PROBE_S
from diloco_protos import parameter_server_pb2 as pb
from diloco_server.shell.access import Callers
from diloco_server.shell.quotas import Places, Rate
from diloco_server.shell.servicer import Context, Messages, only
from diloco_server.shell.streams import STREAMS_EACH, STREAMS_MAX
from diloco_server.shell.waits import BODY_S, Bodies

SERVICE = "grpc.health.v1.Health"
MESSAGE_BYTES_MAX = 1 << 10
"""Limit of a request, which holds only the name of a service."""
WATCH_S = 600.0
"""Most seconds of a Watch. Callers that are still interested ask again, so others free their place."""
PROBES, PROBES_PER_S = 4, 0.2
"""Probes of one account: at once, and per second in the long run."""
Status = health_pb2.HealthCheckResponse


class Health:
    """Answers whether a shard serves. Owned by its event loop."""

    def __init__(
        self, run_id: str, services: Iterable[str], callers: Callers, refused: Callable[[Identity, Refusal], None]
    ) -> None:
        """`services`: the known names. `refused`: called with caller and cause of each refusal."""
        self._run_id, self._callers, self._refused = run_id, callers, refused
        self._status: int = Status.NOT_SERVING
        self._services = frozenset(services)
        self._changed = asyncio.Event()
        self._bodies = Bodies()
        crowded = "watches of its health are open; call Check, or try again later"
        self._watches = Places[object](STREAMS_EACH, STREAMS_MAX, crowded)

    def set(self, status: int) -> None:
        self._status = status
        self._changed.set()
        self._changed = asyncio.Event()

    def handler(self) -> grpc.GenericRpcHandler:
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(self.Check, response_serializer=protobuf.serialize),
            "Watch": grpc.stream_stream_rpc_method_handler(self.Watch, response_serializer=protobuf.serialize),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def Check(self, requests: Messages, context: Context) -> Any:
        async with self._admitted(context):
            status = self._status_of(await self._asked_for(requests))
            if status == Status.SERVICE_UNKNOWN:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
            return Status(status=status)

    async def Watch(self, requests: Messages, context: Context) -> None:
        async with self._admitted(context) as caller:
            await context.send_initial_metadata(())  # see ParameterServer.admitted
            with self._watches.held(caller.account, f"watches of {caller.account or 'this host'}"):
                name = await self._asked_for(requests)
                try:
                    async with asyncio.timeout(WATCH_S) as limit:
                        await self._tell(name, context)
                except TimeoutError:
                    if not limit.expired():
                        raise

    async def _tell(self, name: str, context: Context) -> None:
        told: int | None = None
        while True:
            changed, status = self._changed, self._status_of(name)
            if status != told:
                await context.write(Status(status=status))
                told = status
            await changed.wait()

    def _status_of(self, name: str) -> int:
        return self._status if name in self._services else int(Status.SERVICE_UNKNOWN)

    async def _asked_for(self, requests: Messages) -> str:
        """Read the name of a service. Raises Busy, BadRequest."""
        late = Busy(f"the message did not arrive within {BODY_S:g} s; try again")
        async with self._bodies.place() as wait:
            message = await wait.until(asyncio.get_running_loop().time() + BODY_S, late, partial(only, requests))
        if len(message) > MESSAGE_BYTES_MAX:
            raise BadRequest(f"HealthCheckRequest has {len(message)} bytes; at most {MESSAGE_BYTES_MAX} are taken")
        return str(protobuf.parse(health_pb2.HealthCheckRequest, message).service)

    @asynccontextmanager
    async def _admitted(self, context: Context) -> AsyncIterator[Identity]:
        """The caller, while its connection's certificate is valid. A refusal ends the call."""
        anybody, certificate = Identity(self._run_id, peer=rpc.host_of(context.peer())), rpc.certificate_of(context)
        try:
            caller = self._callers.proven(anybody, certificate)
            async with self._callers.holding(caller):
                yield caller
        except Refusal as refusal:
            self._refused(self._callers.named(anybody, certificate), refusal)
            await rpc.refuse(context, refusal)


class Probe:
    """Answers speed tests. Owned by the shard's event loop."""

    def __init__(
        self,
        admitted: Callable[..., AbstractAsyncContextManager[Identity]],
        wall_clock: Callable[[], float],
        package: str,
    ) -> None:
        """`admitted`: see `ParameterServer.admitted`. `package`: the version that it reports."""
        self._admitted, self._wall_clock, self._package = admitted, wall_clock, package
        self._open = Places[object](1, 2, "others measure their way to this shard; try again in a moment")
        self._rate = Rate("probes", PROBES, PROBES_PER_S)

    def handler(self) -> grpc.GenericRpcHandler:
        measure = grpc.stream_unary_rpc_method_handler(self.Measure, response_serializer=protobuf.serialize)
        return grpc.method_handlers_generic_handler(rpc.PROBE, {"Measure": measure})

    async def Measure(self, requests: Messages, context: Context) -> pb.ProbeResponse:
        async with self._admitted(context, "Probe", answers_many=False) as caller:
            with self._open.held(caller.account, f"probes of {caller.account or 'this host'}"):
                self._rate.take(caller.account, asyncio.get_running_loop().time())
                num_bytes, seconds = await self._take(requests)
                return pb.ProbeResponse(
                    num_bytes=num_bytes, seconds=seconds, clock=self._wall_clock(), package=self._package
                )

    async def _take(self, requests: Messages) -> tuple[int, float]:
        """Bytes after the first message, and seconds from the first message to the last. Raises BadRequest."""
        time = asyncio.get_running_loop().time
        num_bytes, began, last = -1, 0.0, 0.0
        try:
            async with asyncio.timeout(PROBE_S):
                async for message in requests:
                    if len(message) > PROBE_MESSAGE_BYTES + 64:  # with framing
                        raise BadRequest(f"a message of a probe has at most {PROBE_MESSAGE_BYTES} bytes")
                    last = time()
                    if num_bytes < 0:
                        num_bytes, began = 0, last
                        continue
                    num_bytes += len(message)
                    if num_bytes >= PROBE_BYTES_MAX:
                        break
        except TimeoutError:  # a slow link: use the bytes that arrived
            last = max(last, time()) if num_bytes > 0 else last
        return max(0, num_bytes), last - began
