"""diloco.v1.Probe on gRPC: lets whoever may read the model measure the way to this shard, and touches nothing.

Bounded like every other call: the caller is known before a byte of it is taken; one probe of an account at once and two
in all; at most 4 MiB and 2 seconds, and one in 5 seconds in the long run. What comes is thrown away message by message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import grpc

from diloco_common import protobuf, rpc
from diloco_common.errors import BadRequest, Busy
from diloco_common.identity import Identity
from diloco_common.protocol import PROBE_BYTES_MAX, PROBE_MESSAGE_BYTES, PROBE_S
from diloco_common.rate import Rate
from diloco_protos import parameter_server_pb2 as pb
from diloco_server.quotas import Places
from diloco_server.servicer import Context, Messages

PROBES_MAX = 2
"""Probes that may be open at once, of all accounts; one of each."""
PROBES, PROBES_PER_S = 4, 0.2
"""Of one account: so many at once, and so many per second in the long run."""
_FRAMING = 64
"""Bytes of a message beside its zeros, at most."""


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
        self._open = Places[object](1)
        self._rate = Rate("probes", PROBES, PROBES_PER_S)

    def handler(self) -> grpc.GenericRpcHandler:
        """What a gRPC server is given."""
        measure = grpc.stream_unary_rpc_method_handler(self.Measure, response_serializer=protobuf.serialize)
        return grpc.method_handlers_generic_handler(rpc.PROBE, {"Measure": measure})

    async def Measure(self, requests: Messages, context: Context) -> pb.ProbeResponse:
        async with self._admitted(context, "Probe", answers_many=False) as caller:
            with self._place(caller):
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

    @contextmanager
    def _place(self, caller: Identity) -> Iterator[None]:
        """Held while a probe is open. Raises Busy."""
        if len(self._open) >= PROBES_MAX:
            raise Busy(f"{PROBES_MAX} others measure their way to this shard; try again in a moment")
        account, place = caller.account, object()
        self._rate.take(account, asyncio.get_running_loop().time())
        self._open.take_if_free(account, place, f"probes of {account or 'this host'}")
        try:
            yield
        finally:
            self._open.give_back(account, place)
