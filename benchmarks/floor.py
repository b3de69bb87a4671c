"""What an outer round costs at least: the bytes alone, by two ways, and the arithmetic alone.

    python benchmarks/floor.py                          # 100 M parameters, 4 learners, 2 shards, int8 up, bfloat16 down
    python benchmarks/floor.py --push int4 --pull int8

Three measurements take turns. None of them knows rounds, leases or failures:

    gRPC        the bytes of a round through bare gRPC (bare_wire.py)
    sockets     the same bytes through plain TCP sockets: blocking calls, one connection per learner and shard, and one
                checksum where they arrive, as over gRPC. Nothing can move them for less without sharing memory.
    arithmetic  our kernels on fragments that are not in the cache, in one thread: snapshot, encode, norms, merge,
                outer step, publish, decode, apply, as often as all processes together do it in a round

sockets + arithmetic is a floor for any program with these kernels, gRPC + arithmetic for one that speaks gRPC.
outer_round.py measures the real round, the same machine's Gloo beside it.
"""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from statistics import median

import torch

from bare_wire import BareWire, WireSpec, arguments, start, timed
from diloco_common.allocator import tune_allocator
from diloco_common.codec import Payload, crc32c, encode_payload, get_codec
from diloco_common.codec.base import Reference, progress_since
from diloco_common.codec.change import decode_version
from diloco_common.manifest import TensorSpec, cut
from diloco_common.settings import OuterSettings
from diloco_server.core import arithmetic
from diloco_server.core.merge import piece_norms
from diloco_server.core.outer import OuterOptimizer
from diloco_server.core.outer_rules import make_outer_optimizer
from diloco_server.core.round import Contribution

WARM_UP = 1
COLUMNS = 1024
IN_TURN = 3
"""Fragments that the arithmetic goes through: each has left the cache before its turn comes again."""
LEARNER = ("snapshot", "encode", "decode", "apply")
SHARD = ("norms", "merge, step, publish")


class Sockets:
    """The processes. They are idle between rounds."""

    def __init__(self, spec: WireSpec, stack: ExitStack) -> None:
        shards = [start(stack, _run_shard, spec) for _ in range(spec.shards)]
        ports = [pipe.recv() for pipe in shards]
        self._learners = [start(stack, _run_learner, spec, ports) for _ in range(spec.learners)]
        self._all = [*shards, *self._learners]
        for _ in range(WARM_UP):
            self.round()

    def round(self) -> tuple[float, float]:
        """Take one round. Returns its seconds, and the CPU seconds of all processes together."""
        return timed(self._learners, "round", self._all)


def _run_shard(pipe: Connection, spec: WireSpec) -> None:
    """Takes each fragment of each learner and sends one back, in one thread per learner."""
    up, down = _sizes(spec)
    blob = memoryview(bytearray(down))
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        for _ in range(spec.learners):
            connection, _ = server.accept()
            threading.Thread(target=_serve, args=(connection, up, blob), daemon=True).start()
    _answer(pipe, lambda: None)


def _serve(connection: socket.socket, up: int, blob: memoryview) -> None:
    taken = memoryview(bytearray(up))
    while _take(connection, taken):
        connection.sendall(blob)


def _run_learner(pipe: Connection, spec: WireSpec, ports: Sequence[int]) -> None:
    up, down = _sizes(spec)
    connections = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    blob, taken = memoryview(bytearray(up)), [memoryview(bytearray(down)) for _ in ports]

    def sync(shard: int) -> None:
        for _ in range(spec.fragments_of(shard)):
            connections[shard].sendall(blob)
            _take(connections[shard], taken[shard])

    def take_round() -> None:
        threads = [threading.Thread(target=sync, args=(shard,)) for shard in range(spec.shards)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    _answer(pipe, take_round)


def _answer(pipe: Connection, take_round: Callable[[], None]) -> None:
    """Follow the commands from the pipe until its other end is closed."""
    with suppress(EOFError):
        while True:
            if pipe.recv() == "round":
                take_round()
            used = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(used.ru_utime + used.ru_stime)


def _take(connection: socket.socket, into: memoryview) -> bool:
    """Fill the buffer and take its checksum; False: the other side has ended."""
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if count == 0:
            return False
        at += count
    crc32c(into)
    return True


def _sizes(spec: WireSpec) -> tuple[int, int]:
    """Bytes of a fragment, up and down."""
    up, down = (sum(map(len, chunks)) for chunks in (spec.chunks_up(), spec.chunks_down()))
    return up, down


class Arithmetic:
    """All computations of a round, on one fragment after the other."""

    def __init__(self, spec: WireSpec) -> None:
        self._spec = spec
        rows = max(1, spec.parameters // spec.fragments // COLUMNS)
        [self._fragment] = cut([TensorSpec("layers.0.weight", (rows, COLUMNS))], 1, 1).fragments
        self._making = arithmetic.Making("rda", make_outer_optimizer(OuterSettings()))
        self._work = [_FragmentWork(self._fragment.num_elements, spec, self._making.optimizer) for _ in range(IN_TURN)]
        self._steps = 0
        for _ in range(IN_TURN):
            self._fragments_round(dict.fromkeys((*LEARNER, *SHARD), 0.0))

    def round(self) -> dict[str, float]:
        """CPU seconds of each computation, in all processes of a round together."""
        spent = dict.fromkeys((*LEARNER, *SHARD), 0.0)
        for _ in range(IN_TURN):
            self._fragments_round(spent)
        scale = self._spec.parameters / (IN_TURN * self._fragment.num_elements)
        return {
            what: seconds * scale * (self._spec.learners if what in (*LEARNER, "norms") else 1)
            for what, seconds in spent.items()
        }

    def _fragments_round(self, spent: dict[str, float]) -> None:
        """One fragment: one learner's part, and the shard's with the contributions of all learners."""
        self._steps += 1
        work = self._work[self._steps % IN_TURN]
        began = time.thread_time()

        def lap(what: str) -> None:
            nonlocal began
            now = time.thread_time()
            spent[what] += now - began
            began = now

        progress_since(work.anchor, [(0, work.theta)], work.snapshot)
        lap("snapshot")
        payload = encode_payload(work.snapshot, self._spec.push, plus=work.residual, loss=work.residual)
        lap("encode")
        norms = piece_norms(payload, self._fragment.pieces)
        lap("norms")
        contributions = [
            Contribution(f"learner-{i}", i + 1, 0, 1, 0, 1000, 10, one, norms)
            for i, one in enumerate([payload, *work.others])
        ]
        began = time.thread_time()
        arithmetic.step(work.values, self._fragment, contributions, outer_step=self._steps, making=self._making)
        work.published = arithmetic.publish(work.values, self._spec.pull, work.published)
        lap("merge, step, publish")
        change = work.published.change
        version, base = (work.published.values, None) if change is None else (change, work.anchor)
        work.anchor, added = decode_version(version, base, reference=Reference(work.anchor, work.snapshot))
        lap("decode")
        assert added is not None
        work.theta.add_(added)
        lap("apply")


class _FragmentWork:
    """The tensors of a fragment: of one learner, of its shard, and what the other learners have sent."""

    def __init__(self, size: int, spec: WireSpec, optimizer: OuterOptimizer) -> None:
        values = torch.randn(size).mul_(0.02)
        self.theta = values + torch.randn(size).mul_(1e-3)
        self.snapshot = torch.empty(size, dtype=get_codec(spec.push).progress_dtype)
        self.values = arithmetic.Values(values, optimizer.new_buffers(size))
        self.published = arithmetic.publish(self.values, spec.pull)
        self.anchor, _ = decode_version(self.published.values, None)
        self.residual = torch.zeros(size, dtype=get_codec(spec.push).residual_dtype)
        self.others: list[Payload] = [
            encode_payload(torch.randn(size).mul_(1e-3), spec.push) for _ in range(spec.learners - 1)
        ]


def main() -> None:
    spec, rounds = arguments(__doc__)
    tune_allocator()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        ways = {"gRPC": BareWire(spec, stack), "sockets": Sockets(spec, stack)}
        computing = Arithmetic(spec)
        moved, computed = [], []
        for _ in range(rounds):
            moved.append({name: way.round() for name, way in ways.items()})
            computed.append(computing.round())
    arithmetic_s = 0.0
    print(f"CPU seconds of all processes for a round, medians of {rounds}:")
    for what in (*LEARNER, *SHARD):
        seconds = median(r[what] for r in computed)
        arithmetic_s += seconds
        print(f"  {what:<24} {seconds:5.2f}")
    print(f"  {'arithmetic together':<24} {arithmetic_s:5.2f}")
    for name in ways:
        wall, cpu = (median(r[name][i] for r in moved) for i in (0, 1))
        print(f"  {name:<24} {cpu:5.2f}   ({wall:.2f} s), with the arithmetic {cpu + arithmetic_s:.2f}")


if __name__ == "__main__":
    main()
