"""The values of a version as a learner keeps them, and not in float32.

In a run that pulls bfloat16 or changes, every anchor is representable in bfloat16 (change.py), so 2 bytes per parameter
lose nothing. A run that pulls float32 keeps 4. Who computes with an anchor reads it chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco_common.codec import memory
from diloco_common.codec.base import subtract


class Anchor:
    """Values (n,) as chunks of one dtype, float32 or bfloat16, on one device. Nobody writes to them."""

    def __init__(self, chunks: Sequence[Tensor], chunk_elements: int) -> None:
        """`chunks`: 1-D and contiguous, `chunk_elements` each, or the rest; at least one."""
        self.chunks = tuple(chunks)
        self.chunk_elements = chunk_elements
        self._num_elements = sum(chunk.numel() for chunk in self.chunks)

    @classmethod
    def of(cls, values: Tensor) -> Anchor:
        """Values (n,) float32 or bfloat16, in place."""
        return cls((values,), max(1, values.numel()))

    @property
    def dtype(self) -> torch.dtype:
        return self.chunks[0].dtype

    @property
    def device(self) -> torch.device:
        return self.chunks[0].device

    def numel(self) -> int:
        return self._num_elements

    def __getitem__(self, bounds: slice) -> Tensor:
        """Elements start..stop, in the dtype of the anchor: in place where they are of one chunk, else a copy."""
        size, start, stop = self.chunk_elements, bounds.start, bounds.stop
        parts = [
            self.chunks[i][max(0, start - i * size) : min(size, stop - i * size)]
            for i in range(start // size, max(start // size, -(-stop // size) - 1) + 1)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def float32(self) -> Tensor:
        """The values (n,) float32. In place where the anchor is one tensor of float32: do not write to it."""
        if len(self.chunks) == 1:
            return self.chunks[0].float()
        out = memory.empty(self._num_elements, device=self.device)
        for chunk, bound in zip(self.chunks, self.bounds(), strict=True):
            out[bound].copy_(chunk)
        return out

    def minus(self, reference: Tensor | Anchor) -> Tensor:
        """The values - reference, (n,) float32: reference (n,) too, of either dtype."""
        out = memory.empty(self._num_elements, device=self.device)
        for chunk, bound in zip(self.chunks, self.bounds(), strict=True):
            subtract(chunk, reference[bound], out[bound])
        return out

    def bounds(self) -> list[slice]:
        """The elements of each chunk."""
        stops = range(self.chunk_elements, max(1, self._num_elements) + self.chunk_elements, self.chunk_elements)
        return [slice(stop - self.chunk_elements, min(stop, self._num_elements)) for stop in stops]
