"""Reused memory for tensors as large as a fragment.

malloc returns such memory to the kernel, or splits it, so the next tensor gets fresh pages. Clearing them took a fifth
of the codec thread's time (perf, 4.2 M parameters per fragment). Here a block returns to the pool when the last tensor
that views it is gone, whichever thread that happens in.

All sizes share one pool. When each size class had its own list, fragments of neighboring classes each kept free blocks
that the others could have used.

Huge pages are not used: with them, a shard with 100 M parameters once took 24 s to read its versions, and 1 s without.
This was seen on a busy machine and not investigated.

`scratch` returns the buffers that a thread needs while it encodes or decodes. Each thread has its own, by name. On
CUDA, a thread must not run two streams through the codecs at once, because they would share its buffers.
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

from diloco_common.process import trim

LEAST = 2 << 20
"""Smaller tensors, in bytes, come from malloc."""
MOST = 1 << 32
"""Larger tensors also come from malloc: a block reserves more addresses than that, which a machine may refuse."""
SPREAD = 1.5
"""A block serves tensors that differ by at most this factor: different fragments, but not both float32 and bfloat16."""
WINDOW = 1024
"""Blocks that stayed free for this many takes are dropped. With fewer, the next burst needed some of them again: a
block of 16 MiB is 4096 page faults, a tenth of a learner's CPU time in a round of all fragments."""


def empty(size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """A tensor (size,) with arbitrary contents."""
    num_bytes = size * dtype.itemsize
    if torch.device(device).type != "cpu" or not LEAST <= num_bytes <= MOST:
        return torch.empty(size, dtype=dtype, device=device)
    return torch.frombuffer(_pool.take(num_bytes), dtype=dtype, count=size)


def give_back() -> None:
    """Return free blocks, and all memory that malloc has free, to the kernel.

    Call it after a phase whose memory will not be needed again: a shard's seeds are float32, and the versions made
    meanwhile have fragmented their memory.
    """
    _pool.drop()
    trim()


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses. Only pages that a tensor has reached take memory."""

    addresses: mmap.mmap
    reached: int
    """Bytes from the start that the largest tensor so far has used."""

    @classmethod
    def of(cls, num_bytes: int) -> Block:
        return cls(mmap.mmap(-1, int(SPREAD * num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), num_bytes)

    def fits(self, num_bytes: int) -> bool:
        """Whether it is large enough, but not so large that much of its memory would sit idle."""
        return num_bytes <= len(self.addresses) and self.reached <= SPREAD * num_bytes

    def rank(self, num_bytes: int) -> tuple[bool, int]:
        """The lowest rank fits best: the smallest block that need not grow, else the one that grows least."""
        return self.reached < num_bytes, abs(self.reached - num_bytes)


class Pool:
    """Free blocks, for any thread.

    A tensor may be freed while its own thread holds the lock, by the garbage collector. So returning a block takes no
    lock: it waits in a queue for the next `take`.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._returned: deque[Block] = deque()
        self._free: list[Block] = []  # the last one returned is at the end
        self._takes = 0
        self._free_least = 0  # fewest free blocks in the last `_takes`

    def __len__(self) -> int:
        return len(self._free) + len(self._returned)

    def take(self, num_bytes: int) -> memoryview:
        """A block of this size, taken for as long as somebody holds the view. Raises OSError if there is no memory."""
        with self._lock:
            block = self._best(num_bytes)
            self._count()
        block = block or Block.of(num_bytes)
        block.reached = max(block.reached, num_bytes)
        view = memoryview(block.addresses)[:num_bytes]
        weakref.finalize(view, self._returned.append, block).atexit = False
        return view

    def drop(self) -> None:
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
            del self._free[: self._free_least]  # the first ones returned
            self._takes, self._free_least = 0, len(self._free)


_pool = Pool()
"""Memory of large tensors, reused once nothing views it."""


SLICE_ELEMENTS = 2**18
"""Encoders and decoders work on this many elements at a time: 1 MiB of float32, which stays in the cache."""


class _ScratchBuffers(threading.local):
    def __init__(self) -> None:
        self.by_key: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_buffers = _ScratchBuffers()


def scratch(name: str, dtype: torch.dtype, size: int, device: torch.device) -> Tensor:
    """The first `size` elements of this thread's buffer of that name, with arbitrary contents."""
    key = (name, dtype, device)
    buffer = _buffers.by_key.get(key)
    if buffer is None or buffer.numel() < size:
        # Code outside inference mode cannot write to a tensor made inside it.
        with torch.inference_mode(False):
            buffer = _buffers.by_key[key] = torch.empty(size, dtype=dtype, device=device)
    return buffer[:size]


def slices(num_elements: int) -> list[slice]:
    """Cut 0..num_elements into slices of SLICE_ELEMENTS; the last one may be shorter."""
    return [slice(start, min(start + SLICE_ELEMENTS, num_elements)) for start in range(0, num_elements, SLICE_ELEMENTS)]


def slices_of(values: Tensor) -> list[slice]:
    """On a CPU, slices that stay in the cache for the next pass; elsewhere one slice."""
    return slices(values.numel()) if values.device.type == "cpu" else [slice(0, values.numel())]
