"""What an encoding is: how one chunk of float32 values becomes bytes and values again.

A codec holds no state. It runs on the device of the tensors it is given, over cache-sized slices in reused
buffers, and its result depends on nothing but the values: not on slicing, threads or earlier calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from diloco_common.codec.scratch import SLICE_ELEMENTS, scratch, slices
from diloco_common.errors import BadSize, NotFinite

BLOCK_ELEMENTS = 256
"""Elements that share a scale. Chunks, slices and ranges begin at a multiple of it."""


class Codec(ABC):
    """One encoding. Tensors are 1-D and contiguous: values float32, data uint8, both on the same device."""

    name: ClassVar[str]
    """As it stands in the header of a payload."""

    @abstractmethod
    def num_bytes(self, num_elements: int) -> int:
        """Bytes of a chunk of that many elements."""

    @abstractmethod
    def encode_values(self, values: Tensor, out: Tensor) -> None:
        """Encode a chunk: `values` (n,) float32 into `out` (num_bytes(n),) uint8, which begins at a multiple
        of 4 bytes of its storage. Waits for the device once.

        Raises NotFinite if a value is NaN or infinite; `out` then holds nothing of use.
        """

    @abstractmethod
    def check(self, data: Tensor, num_elements: int) -> None:
        """Look whether `data` is a chunk of that many elements, so that `decode_range` cannot fail on it.

        Waits for the device at most once. Raises BadSize, and BadEncoding with the index of the block.
        """

    @abstractmethod
    def decode_range(self, data: Tensor, num_elements: int, start: int, out: Tensor) -> None:
        """Decode elements start..start+m of a chunk of `num_elements` that was checked, into `out` (m,)
        float32.

        `start` is a multiple of BLOCK_ELEMENTS, m at most SLICE_ELEMENTS. Does not wait for the device.
        """

    def encode(
        self,
        values: Tensor,
        out: Tensor,
        *,
        minus: Tensor | None = None,
        plus: Tensor | None = None,
        loss: Tensor | None = None,
    ) -> None:
        """Encode x = `values - minus + plus`, a chunk: each (n,) float32, into `out` as `encode_values` does.

        `loss` (n,) float32 is set to x - decoded; it may be `values` itself. Raises NotFinite.
        """
        x = difference(values, minus, plus, loss)
        self.encode_values(x, out)
        if loss is not None:
            self.accumulate(out, loss, weight=-1.0)

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Decode a whole chunk: `data` (num_bytes(n),) uint8 into `out` (n,) float32.

        Raises BadSize and BadEncoding before anything is written to `out`.
        """
        num_elements = out.numel()
        self.check(data, num_elements)
        for part in slices(num_elements):
            self.decode_range(data, num_elements, part.start, out[part])

    def accumulate(self, data: Tensor, out: Tensor, weight: float) -> None:
        """out += weight * decoded, in float32; `data` (num_bytes(n),) uint8, `out` (n,) float32.

        Raises BadSize and BadEncoding before anything is written to `out`.
        """
        num_elements = out.numel()
        self.check(data, num_elements)
        for part in slices(num_elements):
            self.accumulate_range(data, num_elements, part.start, out[part], weight)

    def accumulate_range(self, data: Tensor, num_elements: int, start: int, out: Tensor, weight: float) -> None:
        """out += weight * elements start..start+m of a chunk of `num_elements` that was checked; `out` (m,) float32.

        Any `start`; m at most SLICE_ELEMENTS - BLOCK_ELEMENTS, or SLICE_ELEMENTS where it is a multiple of
        BLOCK_ELEMENTS.
        """
        out.add_(self._decoded(data, num_elements, start, out.numel()), alpha=weight)

    def sum_squares(self, data: Tensor, num_elements: int, start: int, stop: int) -> float:
        """Sum of squares of elements start..stop of a chunk of `num_elements` that was checked; any start and stop.

        NaN or infinite where an element is, and where a sum leaves the range of float32.
        """
        total, step = 0.0, SLICE_ELEMENTS - BLOCK_ELEMENTS
        for first in range(start, stop, step):
            part = self._decoded(data, num_elements, first, min(step, stop - first))
            total += float(torch.linalg.vector_norm(part)) ** 2
        return total

    def _decoded(self, data: Tensor, num_elements: int, start: int, count: int) -> Tensor:
        """Elements start..start+count, in scratch."""
        before = start % BLOCK_ELEMENTS
        decoded = scratch("decoded", torch.float32, before + count, data.device)
        self.decode_range(data, num_elements, start - before, decoded)
        return decoded[before:]

    def _check_size(self, data: Tensor, num_elements: int) -> None:
        expected = self.num_bytes(num_elements)
        if data.numel() != expected:
            raise BadSize(f"{self.name}: {num_elements} elements take {expected} bytes, got {data.numel()}")


def difference(values: Tensor, minus: Tensor | None, plus: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`values - minus + plus`, in `out` if there is one, else in `values` itself or in scratch; `values` stays."""
    if out is None:
        if minus is None and plus is None:
            return values
        out = scratch("difference", torch.float32, values.numel(), values.device)
    if minus is not None:
        torch.sub(values, minus, out=out)
    elif out.data_ptr() != values.data_ptr():
        out.copy_(values)
    return out if plus is None else out.add_(plus)


def refuse_non_finite(values: Tensor) -> None:
    """Raise NotFinite for the first value that is NaN or infinite; call it knowing that there is one."""
    index = int(torch.isfinite(values).logical_not_().nonzero()[0])
    raise NotFinite(
        f"element {index} of {values.numel()} is {values[index].item()}: it cannot be encoded; "
        "the model has diverged, so look at its loss and learning rate"
    )
