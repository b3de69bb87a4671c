"""Buffers that are allocated once and used again: a fresh large tensor costs more than the work done in it.

Each thread has its own buffers, per device. The same name always gives the same memory. On CUDA, a thread must not run
two streams through the codecs at once, because they would share its buffers.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

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
