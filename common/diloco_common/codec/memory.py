"""Memory for tensors as large as a fragment, used again.

malloc gives such memory back to the kernel, or cuts it up, so the next tensor finds pages that were never touched.
Clearing them took a fifth of the time of the thread that encodes and decodes (perf, 4.2 M parameters per fragment). A
block here returns to the pool when the last tensor that views it is gone, in whichever thread.

All sizes share one pool. With a list for each class of sizes, fragments on both sides of a bound each kept free blocks
that the others could have used.

Not in huge pages: with them, a shard with 100 M parameters once took 24 s to read its versions, and 1 s without. It was
seen on a busy machine and not traced.

`scratch` is for what a thread needs while it encodes or decodes: its own buffers, by name. On CUDA, a thread must not
run two streams through the codecs at once, because they would share its buffers.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from diloco_common.allocator import trim

LEAST = 2 << 20
"""Smaller tensors, in bytes, are left to malloc."""
MOST = 1 << 32
"""Larger ones, too: a block has more addresses than that, which a machine may refuse."""
SPREAD = 1.5
"""A block serves tensors that differ by this factor at most: those of fragments, but not float32 and bfloat16 alike."""
WINDOW = 1024
"""Takes after which the blocks go that were free all the time. After fewer, some went that the next burst needed again:
a block of 16 MiB is 4096 page faults, which took a tenth of a learner's CPU time in a round of all fragments."""


def empty(size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """A tensor (size,) with arbitrary contents."""
    num_bytes = size * dtype.itemsize
    if torch.device(device).type != "cpu" or not LEAST <= num_bytes <= MOST:
        return torch.empty(size, dtype=dtype, device=device)
    return torch.frombuffer(_pool.take(num_bytes), dtype=dtype, count=size)


def give_back() -> None:
    """Blocks that are free, and all that malloc has free, go back to the kernel.

    For the end of a phase whose memory nothing will fill again, as when a shard has taken its seeds: they are float32,
    and were cut up by the versions that were made meanwhile.
    """
    _pool.drop()
    trim()


@dataclass(slots=True, eq=False)
class Block:
    """Addresses, of which only the pages that a tensor reached take memory."""

    addresses: mmap.mmap
    reached: int
    """Bytes from the start, by the largest tensor so far."""

    @classmethod
    def of(cls, num_bytes: int) -> Block:
        """A new block for so many bytes and somewhat more. Raises OSError if there is no memory."""
        return cls(mmap.mmap(-1, int(SPREAD * num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), num_bytes)

    def fits(self, num_bytes: int) -> bool:
        """Whether it is large enough, and not so large that much of its memory would lie idle."""
        return num_bytes <= len(self.addresses) and self.reached <= SPREAD * num_bytes

    def rank(self, num_bytes: int) -> tuple[bool, int]:
        """The least is the best of those that fit: the smallest that need not grow, else the one that grows least."""
        return self.reached < num_bytes, abs(self.reached - num_bytes)


class Pool:
    """Blocks that are free, for any thread.

    A tensor may go while its own thread holds the lock, in a collection of garbage. So that takes no lock: the block
    waits in a queue until somebody takes one.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._returned: deque[Block] = deque()
        self._free: list[Block] = []  # the one that came back last is at the end
        self._takes = 0
        self._free_least = 0  # in the last `_takes`

    def __len__(self) -> int:
        """Blocks that are free."""
        return len(self._free) + len(self._returned)

    def take(self, num_bytes: int) -> memoryview:
        """A block of so many bytes, for as long as somebody holds the view. Raises OSError if there is no memory."""
        with self._lock:
            block = self._best(num_bytes)
            self._count()
        block = block or Block.of(num_bytes)
        block.reached = max(block.reached, num_bytes)
        view = memoryview(block.addresses)[:num_bytes]
        weakref.finalize(view, self._returned.append, block).atexit = False
        return view

    def drop(self) -> None:
        """Forget all blocks that are free."""
        with self._lock:
            self._returned.clear()
            self._free.clear()
            self._takes = self._free_least = 0

    def _best(self, num_bytes: int) -> Block | None:
        while self._returned:
            self._free.append(self._returned.popleft())
        fitting = [i for i in reversed(range(len(self._free))) if self._free[i].fits(num_bytes)]
        if not fitting:
            return None
        return self._free.pop(min(fitting, key=lambda i: self._free[i].rank(num_bytes)))

    def _count(self) -> None:
        self._takes += 1
        self._free_least = min(self._free_least, len(self._free))
        if self._takes >= WINDOW:
            del self._free[: self._free_least]  # those that came back first
            self._takes, self._free_least = 0, len(self._free)


_pool = Pool()
"""Memory of large tensors: it is used again once nobody views it, and not before."""


SLICE_ELEMENTS = 2**18
"""Encoders and decoders work on this many elements at a time: 1 MiB of float32, which stays in the cache."""


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_key: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_buffers = _Buffers()


def scratch(name: str, dtype: torch.dtype, size: int, device: torch.device) -> Tensor:
    """The first `size` elements of this thread's buffer of that name, with arbitrary contents."""
    key = (name, dtype, device)
    buffer = _buffers.by_key.get(key)
    if buffer is None or buffer.numel() < size:
        # A tensor made inside inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            buffer = _buffers.by_key[key] = torch.empty(size, dtype=dtype, device=device)
    return buffer[:size]


def slices(num_elements: int) -> list[slice]:
    """Cut 0..num_elements into slices of SLICE_ELEMENTS; the last one may be shorter."""
    return [slice(start, min(start + SLICE_ELEMENTS, num_elements)) for start in range(0, num_elements, SLICE_ELEMENTS)]


def slices_of(values: Tensor) -> list[slice]:
    """On a CPU slices, so that each is still in the cache for the next pass; elsewhere all at once."""
    return slices(values.numel()) if values.device.type == "cpu" else [slice(0, values.numel())]
