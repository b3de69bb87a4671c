"""The least that makes an outer round: our kernels and bare gRPC, and nothing that a run needs beside them.

Processes, channels, chunks and checksums are those of a real round (bare_wire.py), and so are all computations, each in
the thread where the product has it. There are no leases, directives, quorums, guards, versions, metrics or errors. A
push says its fragment in its first message. A pull waits until all learners have pushed the fragment, and the version
is made. What a real round takes beyond this is the price of being a system; what this takes beyond the sum of its parts
(floor.py) is the price of doing all at once on few cores.

    python benchmarks/bare_round.py                          # 100 M parameters, int8 up, bfloat16 down
    python benchmarks/bare_round.py --push int4 --pull int8
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, TypeVar

import grpc
import torch
from torch import Tensor

from bare_wire import WireSpec, answer, arguments, ask, checked, dial, start, timed
from diloco_common import protobuf, rpc
from diloco_common.allocator import tune_allocator
from diloco_common.codec import Payload, PayloadHeader, encode_payload, get_codec
from diloco_common.codec.base import Reference, progress_since
from diloco_common.codec.change import ANCHOR, VALUES, decode_version
from diloco_common.codec.frames import frame_of
from diloco_common.codec.payload import num_payload_bytes, usual_chunk_elements
from diloco_common.manifest import Fragment, TensorSpec, cut
from diloco_common.protocol import PUSHES_AT_ONCE
from diloco_common.settings import OuterSettings
from diloco_server.core import arithmetic
from diloco_server.core.merge import piece_norms
from diloco_server.core.outer_rules import make_outer_optimizer
from diloco_server.core.round import Contribution

WARM_UP = 2
COLUMNS = 1024
CHANGE = 1e-3
"""What training adds between two rounds is of this size."""

T = TypeVar("T")


class BareRound:
    """The processes. They are idle between rounds."""

    def __init__(self, spec: WireSpec, stack: ExitStack) -> None:
        self._shards = [start(stack, _run_shard, spec, index) for index in range(spec.shards)]
        ports = [pipe.recv() for pipe in self._shards]
        self._learners = [start(stack, _run_learner, spec, ports, rank) for rank in range(spec.learners)]
        for _ in range(WARM_UP):
            self.round()

    def round(self) -> tuple[float, float]:
        """Take one round. Returns its seconds, and the CPU seconds of all processes together."""
        ask(self._learners, "train")
        return timed(self._learners, "round", [*self._shards, *self._learners])


def _fragment_of(spec: WireSpec) -> Fragment:
    """All fragments have the same size, and one piece."""
    rows = max(1, spec.parameters // spec.fragments // COLUMNS)
    [fragment] = cut([TensorSpec("layers.0.weight", (rows, COLUMNS))], 1, 1).fragments
    return fragment


def _values_of(index: int, size: int) -> Tensor:
    """What a fragment begins with: the same in all processes."""
    return torch.randn(size, generator=torch.Generator().manual_seed(index)).mul_(0.02)


def _header_of(encoding: str, size: int, chunked_as: str) -> PayloadHeader:
    """Of a payload that came: here all know it."""
    chunk = usual_chunk_elements(chunked_as)
    return PayloadHeader(encoding, size, chunk, num_payload_bytes(encoding, size, chunk), chunks_crc32c=0)


async def _in(threads: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, job)


# ------------------------------------------------------------ a shard


class _Shard:
    def __init__(self, spec: WireSpec, index: int) -> None:
        self._spec, self._fragment = spec, _fragment_of(spec)
        size = self._fragment.num_elements
        self._header = _header_of(spec.push, size, spec.push)
        self._making = arithmetic.Making("rda", make_outer_optimizer(OuterSettings()))
        self._values = {
            number: arithmetic.Values(_values_of(number, size), self._making.optimizer.new_buffers(size))
            for number in range(index, spec.fragments, spec.shards)
        }
        self._published = {n: arithmetic.publish(values, spec.pull) for n, values in self._values.items()}
        self._came: dict[int, list[Payload]] = defaultdict(list)
        self._rounds: dict[int, asyncio.Future[int]] = {}
        self._steps = dict.fromkeys(self._values, 0)
        self._compute = ThreadPoolExecutor(1)

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            rpc.SERVICE,
            {
                "Push": grpc.stream_unary_rpc_method_handler(self.push),
                "Pull": grpc.unary_stream_rpc_method_handler(self.pull),
            },
        )

    async def push(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        number = int(await anext(requests))
        chunks = [checked(protobuf.push_part(request)) async for request in requests]
        came = self._came[number]
        came.append(Payload(self._header, tuple(chunks)))
        if len(came) == self._spec.learners:
            done = self._made(number, self._steps[number] + 1)
            del self._came[number]
            await _in(self._compute, partial(self._step, number, came))
            done.set_result(self._steps[number])
        return b""

    async def pull(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        number, step = map(int, request.split())
        await asyncio.shield(self._made(number, step))
        published = self._published[number]
        for chunk in (published.change or published.values).chunks:
            yield frame_of(chunk)

    def _made(self, number: int, step: int) -> asyncio.Future[int]:
        """Done once the version of that step is there."""
        made = self._rounds.get(number)
        if made is None or (made.done() and made.result() < step):
            made = self._rounds[number] = asyncio.get_running_loop().create_future()
        return made

    def _step(self, number: int, came: list[Payload]) -> None:
        self._steps[number] += 1
        pieces = self._fragment.pieces
        contributions = [
            Contribution(f"learner-{i}", i + 1, 0, 1, 0, 1000, 10, payload, piece_norms(payload, pieces))
            for i, payload in enumerate(came)
        ]
        values = self._values[number]
        arithmetic.step(values, self._fragment, contributions, outer_step=self._steps[number], making=self._making)
        self._published[number] = arithmetic.publish(values, self._spec.pull, self._published[number])


def _run_shard(pipe: Connection, spec: WireSpec, index: int) -> None:
    async def serve() -> None:
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        server.add_generic_rpc_handlers([_Shard(spec, index).handler()])
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await answer(pipe, {})

    tune_allocator()
    torch.set_num_threads(1)
    asyncio.run(serve())


# ------------------------------------------------------------ a learner


class _Replica:
    """One fragment of one learner."""

    def __init__(self, spec: WireSpec, number: int, size: int) -> None:
        self._push = spec.push
        self.theta = _values_of(number, size)
        self._anchor, _ = decode_version(encode_payload(self.theta, "bfloat16"), None)
        self._residual = torch.zeros(size, dtype=get_codec(spec.push).residual_dtype)
        self._snapshot = torch.empty(size, dtype=get_codec(spec.push).progress_dtype)
        self.step = 0

    def contribute(self) -> Payload:
        progress_since(self._anchor, [(0, self.theta)], self._snapshot)
        return encode_payload(self._snapshot, self._push, plus=self._residual, loss=self._residual)

    def decode(self, version: Payload, *, is_change: bool) -> Tensor:
        """What it adds to theta."""
        base, reference = self._anchor if is_change else None, Reference(self._anchor, self._snapshot)
        self._anchor, added = decode_version(version, base, reference=reference)
        assert added is not None
        return added


class _Learner:
    def __init__(self, spec: WireSpec, ports: list[int], rank: int) -> None:
        self._spec, size = spec, _fragment_of(spec).num_elements
        self._is_change = spec.pull not in VALUES
        self._header = _header_of(spec.pull, size, ANCHOR if self._is_change else spec.pull)
        self._fragments = [_Replica(spec, number, size) for number in range(spec.fragments)]
        self._noise = torch.randn(size, generator=torch.Generator().manual_seed(rank)).mul_(CHANGE)
        channels = [[dial(port) for _ in ("push", "pull")] for port in ports]
        self._pushes = [push.stream_unary(f"/{rpc.SERVICE}/Push") for push, _ in channels]
        self._pulls = [pull.unary_stream(f"/{rpc.SERVICE}/Pull") for _, pull in channels]
        self._pushing = [asyncio.Semaphore(PUSHES_AT_ONCE) for _ in ports]
        self._pulling = [asyncio.Semaphore(1) for _ in ports]
        self._codec, self._training = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    async def train(self) -> None:
        for fragment in self._fragments:
            fragment.theta.add_(self._noise)

    async def round(self) -> None:
        await asyncio.gather(*map(self._sync, range(self._spec.fragments)))

    async def _sync(self, number: int) -> None:
        """Push a fragment, then pull it. Several pushes run at once, but only one pull."""
        fragment, shard = self._fragments[number], number % self._spec.shards
        payload = await _in(self._codec, fragment.contribute)
        fragment.step += 1

        def messages() -> Iterator[bytes]:
            yield b"%d" % number
            yield from map(frame_of, payload.chunks)

        async with self._pushing[shard]:
            await self._pushes[shard](messages())
        async with self._pulling[shard]:
            call = self._pulls[shard](b"%d %d" % (number, fragment.step))
            chunks = [checked(protobuf.pull_part(message)) async for message in call]
        version = Payload(self._header, tuple(chunks))
        added = await _in(self._codec, partial(fragment.decode, version, is_change=self._is_change))
        await _in(self._training, partial(fragment.theta.add_, added))


def _run_learner(pipe: Connection, spec: WireSpec, ports: list[int], rank: int) -> None:
    async def learn() -> None:
        learner = _Learner(spec, ports, rank)
        await answer(pipe, {"train": learner.train, "round": learner.round})

    tune_allocator()
    torch.set_num_threads(1)
    asyncio.run(learn())


def main() -> None:
    spec, count = arguments(__doc__)
    with ExitStack() as stack:
        bare = BareRound(spec, stack)
        rounds = [bare.round() for _ in range(count)]
    seconds, cpu_s = (median(r[i] for r in rounds) for i in (0, 1))
    print(f"a bare round: {seconds:.2f} s, {cpu_s:.2f} CPU seconds of all processes, medians of {count}")


if __name__ == "__main__":
    main()
