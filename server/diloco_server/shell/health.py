"""Another gRPC service of a shard, its health: grpc.health.v1 with Check and Watch.

An orchestrator's probes carry no token, so none is required; over TLS the connection's certificate must be valid.
Messages are read like those of any caller without a lease: few at once, with a deadline (`waits.Bodies`). Their places
are separate from those of Join, so that a crowd of joins does not make a shard look unhealthy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from diloco_common.errors import BadRequest, Busy, Refusal
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf, rpc
from diloco_server.shell.access import Callers
from diloco_server.shell.quotas import Places
from diloco_server.shell.servicer import Context, Messages, only
from diloco_server.shell.streams import STREAMS_EACH, STREAMS_MAX
from diloco_server.shell.waits import BODY_S, Bodies

SERVICE = "grpc.health.v1.Health"
MESSAGE_BYTES_MAX = 1 << 10
"""Size limit of a request, which holds only the name of a service."""
WATCH_S = 600.0
"""Maximum length of a Watch in seconds. Callers that are still interested ask again; the others free their place."""
Status = health_pb2.HealthCheckResponse


class Health:
    """Answers whether a shard serves. Owned by its event loop."""

    def __init__(
        self, run_id: str, services: Iterable[str], callers: Callers, refused: Callable[[Identity, Refusal], None]
    ) -> None:
        """`services`: the known names. `refused`: called with the caller and the cause of each refusal."""
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
            await context.send_initial_metadata(())  # see ParameterServicer.admitted
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
        """Hold this while a call is open; it gives the caller. An expired certificate or a refusal ends the call."""
        anybody, certificate = Identity(self._run_id, peer=rpc.host_of(context.peer())), rpc.certificate_of(context)
        try:
            caller = self._callers.proven(anybody, certificate)
            async with self._callers.holding(caller):
                yield caller
        except Refusal as refusal:
            self._refused(self._callers.named(anybody, certificate), refusal)
            await rpc.refuse(context, refusal)
