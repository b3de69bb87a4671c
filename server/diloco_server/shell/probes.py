"""What else a shard serves on gRPC: whether it is healthy, and how good the way to it is.

grpc.health.v1: Check and Watch, for whoever asks, as cheap as it can be. Probes of an orchestrator have no token, so
none is asked for; over TLS the certificate of the connection must hold. A message is taken in as every other of a
caller without a lease: few at once, with a deadline (`waits.Bodies`). The places are not those of Join: a crowd there
must not make a shard look ill.

diloco.v1.Probe: lets whoever may read the model measure the way to this shard, and touches nothing. It is bounded like
every other call: the caller is known before a byte of it is taken; one probe of an account at once and two in all; at
most 4 MiB and 2 seconds, and one in 5 seconds in the long run. What comes is thrown away message by message.
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
from diloco_server.shell.waits import BODY_S, Bodies

SERVICE = "grpc.health.v1.Health"
MESSAGE_BYTES_MAX = 1 << 10
"""Of a request: it holds the name of a service."""
WATCHES_EACH, WATCHES_MAX = 2, 64
"""Watches that may be open of one account, and of all of them together."""
WATCH_S = 600.0
"""Seconds that a Watch lasts at most. Who still cares asks again; who is gone takes no place for long."""
PROBES_MAX = 2
"""Probes that may be open at once, of all accounts; one of each."""
PROBES, PROBES_PER_S = 4, 0.2
"""Of one account: so many at once, and so many per second in the long run."""
_FRAMING = 64
"""Bytes of a message beside its zeros, at most."""
Status = health_pb2.HealthCheckResponse


class Health:
    """Answers whether a shard serves. Owned by its event loop."""

    def __init__(
        self, run_id: str, services: Iterable[str], callers: Callers, refused: Callable[[str, str, str], None]
    ) -> None:
        """`services`: the names that one may ask for. `refused` is told of refusals: nobody, code and words."""
        self._run_id, self._callers, self._refused = run_id, callers, refused
        self._status: int = Status.NOT_SERVING
        self._services = frozenset(services)
        self._changed = asyncio.Event()
        self._bodies = Bodies()
        crowded = "watches of its health are open; call Check, or try again later"
        self._watches = Places[object](WATCHES_EACH, WATCHES_MAX, crowded)

    def set(self, status: int) -> None:
        """From now on. Watches tell it."""
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
        """What it is, and what it becomes."""
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
        """The name of a service. Raises Busy, BadRequest."""
        late = Busy(f"the message did not come within {BODY_S:g} s; try again")
        async with self._bodies.place() as wait:
            message = await wait.until(asyncio.get_running_loop().time() + BODY_S, late, partial(only, requests))
        if len(message) > MESSAGE_BYTES_MAX:
            raise BadRequest(f"HealthCheckRequest has {len(message)} bytes; at most {MESSAGE_BYTES_MAX} are taken")
        return str(protobuf.parse(health_pb2.HealthCheckRequest, message).service)

    @asynccontextmanager
    async def _admitted(self, context: Context) -> AsyncIterator[Identity]:
        """The caller, while the certificate of its connection holds. A refusal ends the call."""
        anybody = Identity(self._run_id, peer=rpc.host_of(context.peer()))
        try:
            caller = self._callers.proven(anybody, rpc.certificate_of(context))
            async with self._callers.holding(caller):
                yield caller
        except Refusal as refusal:
            self._refused("", refusal.code, str(refusal))
            await rpc.refuse(context, refusal)


class Probe:
    """Answers measurements. Owned by the shard's event loop."""

    def __init__(
        self,
        admitted: Callable[..., AbstractAsyncContextManager[Identity]],
        wall_clock: Callable[[], float],
        package: str,
    ) -> None:
        """`admitted`: who may call, as `ParameterServer.admitted` says. `package`: the version that is told."""
        self._admitted, self._wall_clock, self._package = admitted, wall_clock, package
        self._open = Places[object](1, PROBES_MAX, "others measure their way to this shard; try again in a moment")
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
                    if len(message) > PROBE_MESSAGE_BYTES + _FRAMING:
                        raise BadRequest(f"a message of a probe has at most {PROBE_MESSAGE_BYTES} bytes")
                    last = time()
                    if num_bytes < 0:
                        num_bytes, began = 0, last
                        continue
                    num_bytes += len(message)
                    if num_bytes >= PROBE_BYTES_MAX:
                        break
        except TimeoutError:  # a thin link: what came will do
            last = max(last, time()) if num_bytes > 0 else last
        return max(0, num_bytes), last - began
