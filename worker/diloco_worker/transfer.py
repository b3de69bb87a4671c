"""Contributions and versions on the wire: encode and push, pull and decode.

Snapshots, codec work and what an apply can have computed ahead run on one background thread, so that neither the
training thread nor the event loop waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from diloco_common import protobuf, rpc
from diloco_common.codec import Payload, PayloadReceiver
from diloco_common.codec.change import decode_version
from diloco_common.errors import BadRequest
from diloco_common.messages import PushAnswer, PushHeader
from diloco_common.metrics import WorkerMetrics
from diloco_protos import parameter_server_pb2 as pb
from diloco_worker.core.fragment import Pending, Shift
from diloco_worker.core.replica import wait_for_device

CALL_S = 15.0
"""Seconds for everything of a call but its bytes."""

T = TypeVar("T")


class Transfer:
    """Moves payloads for all links of one learner, and counts the bytes."""

    def __init__(self, device: torch.device, metrics: WorkerMetrics) -> None:
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self.shift_to: Callable[[int, Tensor, int, int], Shift | None] = lambda *_: None
        """`LearnerCore.shift_to`, once there is one: what applying a version will need."""
        self._device = device
        self._metrics = metrics
        self._codec = ThreadPoolExecutor(1, thread_name_prefix="diloco-codec")
        _use_one_core(self._codec)

    def close(self) -> None:
        self._codec.shutdown(wait=False, cancel_futures=True)

    async def contribution(self, pending: Pending, encoding: str) -> Payload:
        """Take the snapshot, and encode, both on the codec thread. Raises NotFinite."""
        await self._on_codec_thread(lambda: self._take_snapshot(pending))
        return await self.encode(partial(pending.encode, encoding))

    async def encode(self, encode: Callable[[], Payload]) -> Payload:
        """Encode on the codec thread. Raises NotFinite."""

        def work() -> Payload:
            began, cpu_began = time.perf_counter(), time.thread_time()
            payload = encode()
            self._metrics.exchange.encoded(time.perf_counter() - began)
            self._metrics.training.computed("encode", time.thread_time() - cpu_began)
            return payload

        return await self._on_codec_thread(work)

    async def push(self, stub: Any, header: PushHeader, payload: Payload, metadata: Any) -> PushAnswer:
        """One attempt. Raises AioRpcError."""
        timeout_s = CALL_S + header.payload.num_bytes / rpc.SLOWEST_BYTES_PER_S
        response = await stub.Push(protobuf.push_requests(header, payload), metadata=metadata, timeout=timeout_s)
        answer = protobuf.answer_from_pb(response)
        self.bytes_pushed += header.payload.num_bytes
        self._metrics.exchange.pushed(answer.outcome.value, header.payload.num_bytes)
        return answer

    async def pull(
        self, stub: Any, request: pb.PullRequest, metadata: Any, num_elements: int, base: Tensor | None = None
    ) -> Pulled | None:
        """One attempt; None if the caller has the latest version. Raises AioRpcError or a Refusal of the bytes.

        `base` is the anchor of the version that the request says the caller has; it is only read.
        """
        timeout_s = CALL_S + 4 * num_elements / rpc.SLOWEST_BYTES_PER_S
        call = stub.Pull(request, metadata=metadata, timeout=timeout_s)
        try:
            header, payload = await read_version(call, request, num_elements)
        finally:
            call.cancel()
        if payload is None:
            return None
        self.bytes_pulled += payload.header.num_bytes
        self._metrics.exchange.pulled(payload.header.num_bytes)
        base = base if header.HasField("base_version") else None
        values, shift = await self._on_codec_thread(lambda: self._decode(header, payload, base))
        return Pulled(header, values, shift)

    @torch.no_grad()
    def _take_snapshot(self, pending: Pending) -> None:
        began = time.thread_time()
        pending.take_snapshot()
        self._metrics.training.computed("snapshot", time.thread_time() - began)

    @torch.no_grad()
    def _decode(self, header: pb.PullHeader, payload: Payload, base: Tensor | None) -> tuple[Tensor, Shift | None]:
        began = time.thread_time()
        values = torch.empty(payload.header.num_elements, device=self._device)
        decode_version(payload, base, values)
        shift = self.shift_to(header.fragment_id, values, header.version, header.merged_version)
        wait_for_device(values)
        self._metrics.training.computed("decode", time.thread_time() - began)
        return values, shift

    async def _on_codec_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._codec, work)


async def read_version(call: Any, request: pb.PullRequest, num_elements: int) -> tuple[pb.PullHeader, Payload | None]:
    """Read the answer to a Pull; no payload if the caller has that version. Raises AioRpcError or a Refusal."""
    first = await call.read()
    if first is rpc.EOF or first.WhichOneof("part") != "header":
        raise BadRequest("the shard answered Pull without a header")
    header = first.header
    if not header.HasField("payload"):
        return header, None
    if header.payload.num_elements != num_elements:
        raise BadRequest(
            f"fragment {header.fragment_id} has {header.payload.num_elements} elements, not {num_elements}"
        )
    have = request.have_version if request.HasField("have_version") else None
    if header.HasField("base_version") and header.base_version != have:
        raise BadRequest(
            f"fragment {header.fragment_id} came as a change since version {header.base_version}, "
            "which is not what was asked for"
        )
    receiver = PayloadReceiver(protobuf.payload_from_pb(header.payload))
    while (part := await call.read()) is not rpc.EOF:
        receiver.add(part.chunk)
    return header, receiver.finish()


def _use_one_core(executor: ThreadPoolExecutor) -> None:
    """Keep torch from starting a second OpenMP team there: two teams on the same cores are slower than one.

    `torch.set_num_threads` decides for the calling thread, and for threads that are yet to begin: put that back.
    """
    threads = torch.get_num_threads()
    executor.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(threads)


class Pulled:
    """A version as it came."""

    def __init__(self, header: pb.PullHeader, values: Tensor, shift: Shift | None) -> None:
        self.version: int = header.version
        self.epoch: int = header.epoch
        self.merged_version: int = header.merged_version
        self.forgotten_version: int = header.forgotten_version
        self.tokens_merged: int = header.tokens_merged
        self.values = values
        self.shift = shift
