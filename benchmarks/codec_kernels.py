"""What each operation on an encoding costs, with the C kernels and with torch, next to copying memory. One thread.

    python benchmarks/codec_kernels.py                       # every encoding, half a minute
    python benchmarks/codec_kernels.py --only int4,topk64_2bit --json kernels.json

The unit is the time of copying as many float32 values (8 bytes per value), measured in turn with the operation: 1.0 is
as long as a copy. The values come from memory, not from the cache. Medians of the ratios.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from diloco_common.allocator import tune_allocator
from diloco_common.codec import encoding_names, get_codec, native
from diloco_common.codec.base import Part

CHUNK = 2**20
NUM_CHUNKS = 16
LEARNERS = 4
SLICE = 2**18


class Subject:
    """One encoding, and what is done with it: a method per row of the table, over all chunks."""

    def __init__(self, encoding: str) -> None:
        self.codec = get_codec(encoding)
        size = CHUNK * NUM_CHUNKS
        self.values = torch.randn(size).mul_(1e-3)
        self.snapshot = self.values.to(self.codec.progress_dtype)
        self.residual = torch.randn(size).mul_(1e-5).to(self.codec.residual_dtype)
        self.base = torch.randn(size).mul_(1e-3).bfloat16()
        self.anchor = torch.empty(size, dtype=torch.bfloat16)
        self.out = torch.empty(size)
        self.chunks = [torch.zeros(self.codec.num_bytes(CHUNK), dtype=torch.uint8) for _ in range(NUM_CHUNKS)]
        self.encode()

    def encode(self) -> int:
        for i, bound in enumerate(_bounds()):
            self.codec.encode(self.values[bound], self.chunks[i])
        return NUM_CHUNKS

    def encode_with_feedback(self) -> int:
        for i, bound in enumerate(_bounds()):
            self.codec.encode(
                self.snapshot[bound],
                self.chunks[i],
                plus=self.residual[bound],
                loss=self.residual[bound],
            )
        return NUM_CHUNKS

    def encode_change(self) -> int:
        for i, bound in enumerate(_bounds()):
            self.codec.encode_change(self.values[bound], self.base[bound], self.chunks[i], self.anchor[bound])
        return NUM_CHUNKS

    def check(self) -> int:
        for chunk in self.chunks:
            self.codec.check(chunk, CHUNK)
        return NUM_CHUNKS

    def sum_squares(self) -> int:
        for chunk in self.chunks:
            self.codec.sum_squares(chunk, CHUNK, 0, CHUNK)
        return NUM_CHUNKS

    def decode(self) -> int:
        for chunk, bound in zip(self.chunks, _bounds(), strict=True):
            self.codec.decode(chunk, self.out[bound])
        return NUM_CHUNKS

    def accumulate(self) -> int:
        for chunk, bound in zip(self.chunks, _bounds(), strict=True):
            self.codec.accumulate(chunk, self.out[bound], 0.5)
        return NUM_CHUNKS

    def merge(self) -> int:
        """The weighted sum of the contributions of all learners, as the shard forms it."""
        for first in range(0, NUM_CHUNKS - LEARNERS + 1, LEARNERS):
            for start in range(0, CHUNK, SLICE):
                parts = [Part(self.chunks[first + i], CHUNK, start) for i in range(LEARNERS)]
                self.codec.weighted_sum(parts, [0.25] * LEARNERS, self.out[start : start + SLICE])
        return NUM_CHUNKS // LEARNERS


OPERATIONS: tuple[Callable[[Subject], int], ...] = (
    Subject.encode, Subject.encode_with_feedback, Subject.encode_change, Subject.check, Subject.sum_squares,
    Subject.decode, Subject.accumulate, Subject.merge,
)  # fmt: skip
"""Each returns how many chunks of float32 values it has gone over."""


def _bounds() -> Iterator[slice]:
    for start in range(0, CHUNK * NUM_CHUNKS, CHUNK):
        yield slice(start, start + CHUNK)


class Copying:
    """Copies as many float32 as a Subject has."""

    def __init__(self) -> None:
        self._source, self._target = torch.ones(CHUNK * NUM_CHUNKS), torch.ones(CHUNK * NUM_CHUNKS)

    def seconds(self) -> float:
        """Of one chunk."""
        began = time.thread_time()
        self._target.copy_(self._source)
        return (time.thread_time() - began) / NUM_CHUNKS


@contextmanager
def by_torch() -> Iterator[None]:
    """Without kernels, as on a machine that has none."""
    native.find.cache_clear()
    with mock.patch.dict("os.environ", {"DILOCO_NATIVE": "0"}):
        native.find()
    try:
        yield
    finally:
        native.find.cache_clear()
        native.find()


def in_copies(operation: Callable[[], int], copying: Copying, repeats: int) -> float:
    """Median of the time of an operation, in copies of what it goes over."""
    ratios = []
    for repeat in range(repeats + 1):
        copy_s = copying.seconds()
        began = time.thread_time()
        num_chunks = operation()
        taken = time.thread_time() - began
        if repeat:
            ratios.append(taken / num_chunks / copy_s)
    return median(ratios)


def measure(encoding: str, repeats: int) -> dict[str, tuple[float, float]]:
    """Operation -> its time with the kernels and with torch, in copies."""
    subject, copying = Subject(encoding), Copying()
    found = {}
    for operation in OPERATIONS:
        by_kernels = in_copies(lambda operation=operation: operation(subject), copying, repeats)
        with by_torch():
            found[operation.__name__] = (
                by_kernels,
                in_copies(lambda operation=operation: operation(subject), copying, max(1, repeats // 3)),
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(encoding_names()), metavar="NAMES", help="encodings, by comma")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(1)
    found = {encoding: measure(encoding, args.repeats) for encoding in args.only.split(",")}
    print(f"{'times of copying float32':24}" + "".join(f"{name:>22}" for name in found))
    print(f"{'':24}" + f"{'kernels    torch':>22}" * len(found))
    for operation in OPERATIONS:
        row = [found[encoding][operation.__name__] for encoding in found]
        print(f"{operation.__name__:24}" + "".join(f"{ours:13.2f} {theirs:8.2f}" for ours, theirs in row))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
