"""The cost of the bytes of an outer round in gRPC alone.

The processes, channels, options, messages, chunk sizes and checksums are those of a real round. There is nothing else:
no arithmetic, no rounds, no state. A learner pulls a fragment as soon as it has pushed it. If a real round takes
longer, the difference is our own cost.

Two ways to make and read the messages take turns: frames by hand, as the product does, are the floor; generated classes
are what anybody would write first.

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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import grpc

from diloco_common import protobuf, rpc
from diloco_common.allocator import tune_allocator
from diloco_common.codec import Chunk, crc32c, encoding_names
from diloco_common.codec.frames import frame_of, framed
from diloco_common.codec.payload import num_payload_bytes, usual_chunk_elements
from diloco_common.protocol import PUSHES_AT_ONCE
from diloco_protos import parameter_server_pb2 as pb

WARM_UP = 2
BY_HAND, GENERATED = "frames by hand", "generated classes"
SERVICES = {BY_HAND: rpc.SERVICE, GENERATED: "generated"}
"""Which service of a shard takes and gives messages of this kind."""


@dataclass(frozen=True)
class WireSpec:
    """One round: each learner pushes and pulls every fragment. All fragments have the same size."""

    learners: int
    shards: int
    fragments: int
    parameters: int
    push: str
    pull: str

    def chunks_up(self) -> list[Chunk]:
        return self._chunks(self.push)

    def chunks_down(self) -> list[Chunk]:
        return self._chunks(self.pull)

    def gigabytes(self) -> float:
        one_learner = sum(map(len, [*self.chunks_up(), *self.chunks_down()])) * self.fragments
        return self.learners * one_learner / 1e9

    def _chunks(self, encoding: str) -> list[Chunk]:
        """A fragment's chunks, each in its frame. Chunks of equal size are the same object."""
        size = usual_chunk_elements(encoding)
        whole, rest = divmod(self.parameters // self.fragments, size)
        filled = [os.urandom(num_payload_bytes(encoding, n)) for n in (size, rest)]
        chunk, last = (framed(data, crc32c(data)) for data in filled)
        chunks: list[Chunk] = [chunk] * whole + [last] * bool(rest)
        return chunks

    def fragments_of(self, shard: int) -> int:
        return len(range(shard, self.fragments, self.shards))


class BareWire:
    """The processes. They are idle between rounds."""

    def __init__(self, spec: WireSpec, stack: ExitStack) -> None:
        self._shards = [start(stack, _run_shard, spec) for _ in range(spec.shards)]
        ports = [pipe.recv() for pipe in self._shards]
        self._learners = [start(stack, _run_learner, spec, ports) for _ in range(spec.learners)]
        for _ in range(WARM_UP):
            self.round()

    def round(self, messages: str = BY_HAND) -> tuple[float, float]:
        """Take one round with such messages. Returns its seconds, and the CPU seconds of all processes together."""
        return timed(self._learners, messages, [*self._shards, *self._learners])


def start(stack: ExitStack, run: Callable[..., None], *args: Any) -> Connection:
    """A process that runs `run(pipe, *args)`, killed at the end. Returns the other end of its pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    stack.callback(process.kill)
    return ours


def ask(pipes: list[Connection], what: str) -> list[float]:
    """Tell all of them, and wait for what they say: CPU seconds of each process so far."""
    for pipe in pipes:
        pipe.send(what)
    return [pipe.recv() for pipe in pipes]


def timed(pipes: list[Connection], what: str, everybody: list[Connection]) -> tuple[float, float]:
    """Seconds until all of them have done it, and the CPU seconds that everybody has taken meanwhile."""
    cpu_before, began = sum(ask(everybody, "cpu")), time.perf_counter()
    ask(pipes, what)
    seconds = time.perf_counter() - began
    return seconds, sum(ask(everybody, "cpu")) - cpu_before


async def answer(pipe: Connection, commands: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Follow the commands from the pipe until its other end is closed: each is answered with the CPU seconds so far."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            what = await loop.run_in_executor(None, pipe.recv)
        except EOFError:
            return
        if what in commands:
            await commands[what]()
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(used.ru_utime + used.ru_stime)


# ------------------------------------------------------------ a shard


class _Shard:
    """Takes all pushes, holds them until the round is over, and gives every learner the same bytes."""

    def __init__(self, spec: WireSpec) -> None:
        self._down = spec.chunks_down()
        self._held_max = spec.learners * spec.fragments // spec.shards
        self._held: list[list[Chunk]] = []

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        generated = {
            "Push": grpc.stream_unary_rpc_method_handler(self.push_generated, pb.PushRequest.FromString),
            "Pull": grpc.unary_stream_rpc_method_handler(
                self.pull_generated, response_serializer=pb.PullResponse.SerializeToString
            ),
        }
        by_hand = {
            "Push": grpc.stream_unary_rpc_method_handler(self.push),
            "Pull": grpc.unary_stream_rpc_method_handler(self.pull),
        }
        return [
            grpc.method_handlers_generic_handler(SERVICES[GENERATED], generated),
            grpc.method_handlers_generic_handler(SERVICES[BY_HAND], by_hand),
        ]

    async def push(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        self._hold([checked(protobuf.push_part(request)) async for request in requests])
        return b""

    async def pull(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for chunk in self._down:
            yield frame_of(chunk)

    async def push_generated(self, requests: AsyncIterator[pb.PushRequest], context: Any) -> bytes:
        self._hold([checked(request.chunk) async for request in requests])
        return b""

    async def pull_generated(self, request: bytes, context: Any) -> AsyncIterator[pb.PullResponse]:
        for data in self._bytes_down:
            yield pb.PullResponse(chunk=data, crc32c=0)

    @cached_property
    def _bytes_down(self) -> list[bytes]:
        """The chunks as the generated classes take them. As above, those of equal size are the same object."""
        return _as_bytes(self._down)

    def _hold(self, chunks: list[Chunk]) -> None:
        if len(self._held) >= self._held_max:
            self._held.clear()
        self._held.append(chunks)


def checked(chunk: Any) -> Chunk:
    """Takes the checksum of a chunk, and compares it with nothing."""
    crc32c(chunk)
    return chunk  # type: ignore[no-any-return]


def _as_bytes(chunks: Iterable[Chunk]) -> list[bytes]:
    copies: dict[int, bytes] = {}
    return [copies.setdefault(id(chunk), bytes(chunk)) for chunk in chunks]


def _run_shard(pipe: Connection, spec: WireSpec) -> None:
    async def serve() -> None:
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        server.add_generic_rpc_handlers(_Shard(spec).handlers())
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await answer(pipe, {})

    tune_allocator()
    asyncio.run(serve())


# ------------------------------------------------------------ a learner


def _run_learner(pipe: Connection, spec: WireSpec, ports: list[int]) -> None:
    async def learn() -> None:
        up = spec.chunks_up()
        bytes_up = _as_bytes(up)
        bulk = [[dial(port) for _ in ("push", "pull")] for port in ports]
        pushing = [asyncio.Semaphore(PUSHES_AT_ONCE) for _ in ports]
        pulling = [asyncio.Semaphore(1) for _ in ports]

        async def sync(shard: int, messages: str) -> None:
            """Push a fragment, then pull it. Several pushes run at once, but only one pull."""
            push, pull = (_calls(channel, messages) for channel in bulk[shard])
            async with pushing[shard]:
                if messages == BY_HAND:
                    await push.push(frame_of(chunk) for chunk in up)
                else:
                    await push.push(pb.PushRequest(chunk=data, crc32c=0) for data in bytes_up)
            async with pulling[shard]:
                async for message in pull.pull(b""):
                    checked(protobuf.pull_part(message) if messages == BY_HAND else message.chunk)

        async def take_round(messages: str) -> None:
            await asyncio.gather(*(sync(i, messages) for i in range(spec.shards) for _ in range(spec.fragments_of(i))))

        await answer(pipe, {messages: partial(take_round, messages) for messages in SERVICES})

    tune_allocator()
    asyncio.run(learn())


def dial(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.BULK_CHANNEL_OPTIONS)


class _Calls(NamedTuple):
    push: Callable[..., Any]
    pull: Callable[..., Any]


def _calls(channel: grpc.aio.Channel, messages: str) -> _Calls:
    service = SERVICES[messages]
    serialize, parse = (None, None) if messages == BY_HAND else (_serialize, pb.PullResponse.FromString)
    return _Calls(
        channel.stream_unary(f"/{service}/Push", request_serializer=serialize),
        channel.unary_stream(f"/{service}/Pull", response_deserializer=parse),
    )


def _serialize(message: pb.PushRequest) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def arguments(doc: str) -> tuple[WireSpec, int]:
    """The round that the command line asks for, and how many of them. `doc`: of the program."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--params", type=float, default=100e6, metavar="N", help="parameters (default: 100e6)")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument(
        "--push", default="int8", choices=encoding_names(), help="encoding of contributions (default: int8)"
    )
    parser.add_argument(
        "--pull", default="bfloat16", choices=encoding_names(), help="encoding of versions (default: bfloat16)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    spec = WireSpec(args.learners, args.shards, args.fragments, int(args.params), args.push, args.pull)
    return spec, args.rounds


def main() -> None:
    spec, count = arguments(__doc__)
    with ExitStack() as stack:
        wire = BareWire(spec, stack)
        rounds = [{messages: wire.round(messages) for messages in SERVICES} for _ in range(count)]
    moved = spec.gigabytes()
    for messages in SERVICES:
        seconds, cpu_s = (median(r[messages][i] for r in rounds) for i in (0, 1))
        print(f"{messages:<18} {moved:.2f} GB: {seconds:.2f} s, {cpu_s:.2f} CPU seconds, {cpu_s / moved:.2f} per GB")
    ratios = [median(r[BY_HAND][i] / r[GENERATED][i] for r in rounds) for i in (0, 1)]
    print(f"by hand takes {ratios[0]:.2f} of the seconds and {ratios[1]:.2f} of the CPU seconds (neighbouring rounds)")


if __name__ == "__main__":
    main()
