"""The cost of the bytes of an outer round in gRPC alone.

The processes, channels, options, messages, chunk sizes and checksums are those of a real round. There is nothing else:
no arithmetic, no rounds, no state. A learner pulls a fragment as soon as it has pushed it. If a real round takes
longer, the difference is our own cost.

    python benchmarks/bare_wire.py                          # 100 M parameters, int8 up, bfloat16 down
    python benchmarks/bare_wire.py --push int4 --pull int8
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import google_crc32c
import grpc

from diloco_common import rpc
from diloco_common.allocator import tune_allocator
from diloco_common.codec.payload import CHUNK_ELEMENTS, num_payload_bytes
from diloco_common.protocol import PUSHES_AT_ONCE
from diloco_protos import parameter_server_pb2 as pb
from diloco_protos import parameter_server_pb2_grpc as pb_grpc

WARM_UP = 2


@dataclass(frozen=True)
class WireSpec:
    """One round: each learner pushes and pulls every fragment. All fragments have the same size."""

    learners: int
    shards: int
    fragments: int
    parameters: int
    push: str
    pull: str

    def chunks_up(self) -> list[bytes]:
        return self._chunks(self.push)

    def chunks_down(self) -> list[bytes]:
        return self._chunks(self.pull)

    def gigabytes(self) -> float:
        one_learner = sum(map(len, [*self.chunks_up(), *self.chunks_down()])) * self.fragments
        return self.learners * one_learner / 1e9

    def _chunks(self, encoding: str) -> list[bytes]:
        """A fragment's chunks. Chunks of equal size are the same object."""
        whole, rest = divmod(self.parameters // self.fragments, CHUNK_ELEMENTS)
        chunk, last = (os.urandom(num_payload_bytes(encoding, n)) for n in (CHUNK_ELEMENTS, rest))
        return [chunk] * whole + [last] * bool(rest)

    def fragments_of(self, shard: int) -> int:
        return len(range(shard, self.fragments, self.shards))


class BareWire:
    """The processes. They are idle between rounds."""

    def __init__(self, spec: WireSpec, stack: ExitStack) -> None:
        self._shards = [_start(stack, _run_shard, spec) for _ in range(spec.shards)]
        ports = [pipe.recv() for pipe in self._shards]
        self._learners = [_start(stack, _run_learner, spec, ports) for _ in range(spec.learners)]
        for _ in range(WARM_UP):
            self.round()

    def round(self) -> tuple[float, float]:
        """Take one round. Returns its seconds, and the CPU seconds of all processes together."""
        cpu_before, began = self._cpu_s(), time.perf_counter()
        _ask(self._learners, "round")
        seconds = time.perf_counter() - began
        return seconds, self._cpu_s() - cpu_before

    def _cpu_s(self) -> float:
        return sum(_ask([*self._shards, *self._learners], "cpu"))


def _start(stack: ExitStack, run: Callable[..., None], *args: Any) -> Connection:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    stack.callback(process.kill)
    return ours


def _ask(pipes: list[Connection], what: str) -> list[float]:
    for pipe in pipes:
        pipe.send(what)
    return [pipe.recv() for pipe in pipes]


async def _answer(pipe: Connection, take_round: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
    """Follow the commands from the pipe until its other end is closed."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            what = await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            return
        if what == "round" and take_round is not None:
            await take_round()
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(used.ru_utime + used.ru_stime)


# ------------------------------------------------------------ a shard


class _Shard(pb_grpc.ParameterServerServicer):
    """Takes all pushes, holds them until the round is over, and gives every learner the same bytes."""

    def __init__(self, spec: WireSpec) -> None:
        self._down = spec.chunks_down()
        self._held_max = spec.learners * spec.fragments // spec.shards
        self._held: list[list[bytes]] = []

    async def Push(self, requests: AsyncIterator[pb.PushRequest], context: Any) -> pb.PushResponse:
        crc32c, chunks = 0, []
        async for part in requests:
            crc32c = google_crc32c.extend(crc32c, part.chunk)
            chunks.append(part.chunk)
        if len(self._held) >= self._held_max:
            self._held.clear()
        self._held.append(chunks)
        return pb.PushResponse()

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncIterator[pb.PullResponse]:
        for chunk in self._down:
            yield pb.PullResponse(chunk=chunk)


def _run_shard(pipe: Connection, spec: WireSpec) -> None:
    async def serve() -> None:
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        pb_grpc.add_ParameterServerServicer_to_server(_Shard(spec), server)
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await _answer(pipe)

    tune_allocator()
    asyncio.run(serve())


# ------------------------------------------------------------ a learner


def _run_learner(pipe: Connection, spec: WireSpec, ports: list[int]) -> None:
    async def learn() -> None:
        up = spec.chunks_up()
        bulk = [[_dial(port) for _ in ("push", "pull")] for port in ports]
        pushing = [asyncio.Semaphore(PUSHES_AT_ONCE) for _ in ports]
        pulling = [asyncio.Semaphore(1) for _ in ports]

        async def requests() -> AsyncIterator[pb.PushRequest]:
            for chunk in up:
                yield pb.PushRequest(chunk=chunk)

        async def sync(shard: int) -> None:
            """Push a fragment, then pull it. Several pushes run at once, but only one pull."""
            async with pushing[shard]:
                await bulk[shard][0].Push(requests())
            async with pulling[shard]:
                crc32c = 0
                async for part in bulk[shard][1].Pull(pb.PullRequest()):
                    crc32c = google_crc32c.extend(crc32c, part.chunk)

        async def take_round() -> None:
            await asyncio.gather(*(sync(i) for i in range(spec.shards) for _ in range(spec.fragments_of(i))))

        await _answer(pipe, take_round)

    tune_allocator()
    asyncio.run(learn())


def _dial(port: int) -> pb_grpc.ParameterServerStub:
    return pb_grpc.ParameterServerStub(grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.BULK_CHANNEL_OPTIONS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=100e6, metavar="N", help="parameters (default: 100e6)")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--push", default="int8", help="encoding of contributions (default: int8)")
    parser.add_argument("--pull", default="bfloat16", help="encoding of versions (default: bfloat16)")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    spec = WireSpec(args.learners, args.shards, args.fragments, int(args.params), args.push, args.pull)
    with ExitStack() as stack:
        wire = BareWire(spec, stack)
        rounds = [wire.round() for _ in range(args.rounds)]
    seconds, cpu_s = median(s for s, _ in rounds), median(cpu for _, cpu in rounds)
    moved = spec.gigabytes()
    print(f"{moved:.2f} GB: {seconds:.2f} s, {cpu_s:.2f} CPU seconds, {cpu_s / moved:.2f} per GB")


if __name__ == "__main__":
    main()
