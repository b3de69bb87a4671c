"""The interface of an encoding: it turns one chunk of float32 values into bytes, and bytes back into values.

A codec holds no state. It runs on the device of its tensors, over cache-sized slices in reused buffers. Its result
depends only on the values, not on slicing, threads or earlier calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from diloco_common.codec.memory import SLICE_ELEMENTS, scratch, slices, slices_of
from diloco_common.codec.native import BLOCK, Loops, WeightedSum, kernels
from diloco_common.errors import BadPayload, NotFinite

BLOCK_ELEMENTS = BLOCK
"""Elements that share a scale. Chunks, slices and ranges begin at a multiple of it."""
BFLOAT16_MAX = torch.finfo(torch.bfloat16).max


class ChunkPart(NamedTuple):
    """Elements of a checked chunk, from `start` on. The length of the output says how many."""

    data: Tensor
    num_elements: int
    """Elements of the whole chunk."""
    start: int


class Reference(NamedTuple):
    """What a version is compared with: `values - progress`, both (n,)."""

    values: Tensor
    """float32 or bfloat16."""
    progress: Tensor | None = None
    """float32 or bfloat16. None: zeros."""

    @property
    def is_for_kernels(self) -> bool:
        return self.progress is None or self.values.dtype == self.progress.dtype == torch.bfloat16

    def part(self, bound: slice) -> Reference:
        return Reference(self.values[bound], None if self.progress is None else self.progress[bound])


class Codec(ABC):
    """One encoding. Tensors are 1-D and contiguous: values float32, data uint8, both on the same device."""

    name: ClassVar[str]
    """The name in the header of a payload."""
    residual_dtype: ClassVar[torch.dtype] = torch.float32
    """Dtype of the error that a learner keeps for error feedback: float32, or bfloat16 if the error of an element is at
    most half a step of its codes; rounding may then lose a thousandth of a step. An encoding that leaves out large
    elements for many rounds needs float32: rounding would lose small values next to the accumulated ones."""
    progress_dtype: ClassVar[torch.dtype] = torch.float32
    """Dtype of a contribution before it is encoded: float32, or bfloat16 if codes are no finer. The rounding error
    stays in the model, so the next contribution includes it."""

    @abstractmethod
    def num_bytes(self, num_elements: int) -> int:
        """The size in bytes of a chunk of that many elements."""

    @abstractmethod
    def encode_values(self, values: Tensor, out: Tensor) -> None:
        """Encode a chunk: `values` (n,) float32 into `out` (num_bytes(n),) uint8. Waits for the device once.

        `out` begins at a multiple of 4 bytes of its storage. Raises NotFinite if a value is NaN or infinite; `out` is
        then useless.
        """

    @abstractmethod
    def check(self, data: Tensor, num_elements: int) -> None:
        """Check that `data` is a valid chunk of that many elements, so that `decode_range` cannot fail on it.

        Waits for the device at most once. Raises BadPayload, with the index of the block.
        """

    @abstractmethod
    def decode_range(self, data: Tensor, num_elements: int, start: int, out: Tensor) -> None:
        """Decode elements start..start+m of a checked chunk of `num_elements` into `out` (m,) float32.

        `start` is a multiple of BLOCK_ELEMENTS, m at most SLICE_ELEMENTS. Does not wait for the device.
        """

    def encode(self, values: Tensor, out: Tensor, *, plus: Tensor | None = None, loss: Tensor | None = None) -> None:
        """Encode the chunk x = `values + plus`, each (n,) float32, into `out` as `encode_values` does.

        `values` may be bfloat16; so may `plus` and `loss`, if both are. Writes the error x - decoded, computed in
        float32, to `loss` (n,) in its own dtype. `loss` may be `values` or `plus` itself. Raises NotFinite.
        """
        self._check_size(out, values.numel())
        native = self._native(out)
        if native is None:
            lost = _in_float32(loss)
            x = total(values, plus, lost)
            self.encode_values(x, out)
            if loss is not None and lost is not None:
                self.accumulate(out, lost, weight=-1.0)
                if lost is not loss:
                    loss.copy_(lost.clamp_(-BFLOAT16_MAX, BFLOAT16_MAX))
        elif not native.encode(values, plus, loss, out):
            refuse_non_finite(total(values, plus))

    def encode_change(self, values: Tensor, base: Tensor, out: Tensor, anchor: Tensor) -> None:
        """Encode the change of a chunk from `base` to `values` into `out`; `anchor` <- base + decoded, rounded.

        `values` (n,) float32; base and anchor (n,) bfloat16. Raises NotFinite.
        """
        num_elements, device = values.numel(), values.device
        self.encode(torch.sub(values, base, out=scratch("change", torch.float32, num_elements, device)), out)
        for part in slices(num_elements):
            decoded = scratch("change: decoded", torch.float32, part.stop - part.start, device)
            self.decode_range(out, num_elements, part.start, decoded)
            add_rounded(base[part], decoded, anchor[part])

    def decode_change(
        self, data: Tensor, base: Tensor, anchor: Tensor, reference: Reference | None = None, out: Tensor | None = None
    ) -> None:
        """`anchor` <- base + the decoded chunk, rounded as `encode_change` does; `out` <- anchor - reference.

        base and anchor (n,) bfloat16; reference (n,), and `out` (n,) float32: both or neither.
        Raises BadPayload before anything is written.
        """
        num_elements = base.numel()
        self.check(data, num_elements)
        for part in slices(num_elements):
            decoded = scratch("change: decoded", torch.float32, part.stop - part.start, data.device)
            self.decode_range(data, num_elements, part.start, decoded)
            add_rounded(base[part], decoded, anchor[part])
            if reference is not None and out is not None:
                subtract(anchor[part], reference.part(part), out[part])

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Decode a whole chunk: `data` (num_bytes(n),) uint8 into `out` (n,) float32.
        Raises BadPayload before anything is written to `out`."""
        num_elements = out.numel()
        self.check(data, num_elements)
        for part in slices(num_elements):
            self.decode_range(data, num_elements, part.start, out[part])

    def accumulate(self, data: Tensor, out: Tensor, weight: float) -> None:
        """out += weight * decoded, in float32; `data` (num_bytes(n),) uint8, `out` (n,) float32.
        Raises BadPayload before anything is written to `out`."""
        num_elements = out.numel()
        self.check(data, num_elements)
        for part in slices(num_elements):
            self.accumulate_range(data, num_elements, part.start, out[part], weight)

    def accumulate_range(self, data: Tensor, num_elements: int, start: int, out: Tensor, weight: float) -> None:
        """out += weight * elements start..start+m of a checked chunk of `num_elements`; `out` (m,) float32.

        Any `start`; m at most SLICE_ELEMENTS - BLOCK_ELEMENTS, or SLICE_ELEMENTS if `start` is a multiple of
        BLOCK_ELEMENTS.
        """
        native = self._native(data)
        if native is None or not native.decodes:
            out.add_(self._decoded(data, num_elements, start, out.numel()), alpha=weight)
        else:
            native.accumulate(data, num_elements, start, out, weight)

    def weighted_sum(self, parts: Sequence[ChunkPart], weights: Sequence[float], out: Tensor) -> float:
        """out <- sum of weights[i] * parts[i], in float32 and in this order; returns the sum of its squares.

        `out` (m,) float32, m as in `accumulate_range`. The parts may come from chunks of different lengths, but their
        starts must differ by multiples of BLOCK_ELEMENTS.
        """
        native = self.native_sum(parts, weights)
        if native is not None:
            return native.into(out)
        out.zero_()
        for part, weight in zip(parts, weights, strict=True):
            self.accumulate_range(part.data, part.num_elements, part.start, out, weight)
        return float(torch.linalg.vector_norm(out)) ** 2

    def native_sum(self, parts: Sequence[ChunkPart], weights: Sequence[float]) -> WeightedSum | None:
        """The weighted sum in a form that other kernels can use; None without kernels."""
        native = self._native(parts[0].data)
        return native.weighted_sum(parts, weights) if native else None

    def sum_squares(self, data: Tensor, num_elements: int, start: int, stop: int) -> float:
        """Sum of squares of elements start..stop of a checked chunk of `num_elements`; any start and stop.

        The result is NaN or infinite if an element is, or if a sum exceeds the range of float32.
        """
        if (native := self._native(data)) is not None:
            return native.sum_squares(data, num_elements, start, stop)
        total, step = 0.0, SLICE_ELEMENTS - BLOCK_ELEMENTS
        for first in range(start, stop, step):
            part = self._decoded(data, num_elements, first, min(step, stop - first))
            total += float(torch.linalg.vector_norm(part)) ** 2
        return total

    def _decoded(self, data: Tensor, num_elements: int, start: int, count: int) -> Tensor:
        before = start % BLOCK_ELEMENTS
        decoded = scratch("decoded", torch.float32, before + count, data.device)
        self.decode_range(data, num_elements, start - before, decoded)
        return decoded[before:]

    def _native(self, data: Tensor) -> Loops | None:
        """The kernels of this encoding for the device of `data`; None: torch does the work."""
        return None

    def _check_size(self, data: Tensor, num_elements: int) -> None:
        expected = self.num_bytes(num_elements)
        if data.numel() != expected:
            raise BadPayload(f"{self.name}: {num_elements} elements take {expected} bytes, got {data.numel()}")


def _in_float32(loss: Tensor | None) -> Tensor | None:
    """Where to compute an error: in place, or in scratch if it is kept with fewer bits."""
    if loss is None or loss.dtype == torch.float32:
        return loss
    return scratch("loss", torch.float32, loss.numel(), loss.device)


def total(values: Tensor, plus: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`values + plus`, in `out` if given, else in scratch; `values` itself if there is nothing to compute.

    `values` and `plus` (n,) float32 or bfloat16; `out` float32, and possibly one of them.
    """
    if out is None:
        if plus is None and values.dtype == torch.float32:
            return values
        out = scratch("total", torch.float32, values.numel(), values.device)
    if plus is not None and out.data_ptr() == plus.data_ptr():
        return out.add_(values)
    if out.data_ptr() != values.data_ptr():
        out.copy_(values)
    return out if plus is None else out.add_(plus)


def progress_since(anchor: Tensor, thetas: Iterable[tuple[int, Tensor]], out: Tensor) -> None:
    """out <- anchor - theta, in float32: both (n,) of any floating dtype, with the anchor rounded to theta's dtype.
    Values that `out` cannot hold become infinite.

    `thetas`: parts of theta, each with its start. They come unsliced, since making a slice costs more than calling a
    kernel.
    """
    is_usual = anchor.dtype == out.dtype == torch.bfloat16 and out.device.type == "cpu"
    native = kernels() if is_usual else None
    for start, theta in thetas:
        if native is not None and theta.dtype in (torch.float32, torch.bfloat16):
            native.progress(anchor, theta, out, start)
            continue
        for part in slices_of(theta):
            into = slice(start + part.start, start + part.stop)
            since = as_held(anchor[into], theta.dtype)
            torch.sub(since, theta[part], out=out[into])  # in float32 for any dtypes, and rounded once


def rounds(dtype: torch.dtype, values: torch.dtype) -> bool:
    """Whether a tensor of this dtype cannot hold all values of the other one."""
    return dtype not in (torch.float32, values)


def as_held(values: Tensor, dtype: torch.dtype) -> Tensor:
    """These values as a tensor of this dtype holds them: unchanged, or rounded to float32 values of it."""
    return values.to(dtype).float() if rounds(dtype, values.dtype) else values


def subtract(version: Tensor, reference: Reference, out: Tensor) -> None:
    """out <- version - reference, in float32: the version (m,) float32 or bfloat16, out (m,) float32."""
    values, progress = reference
    is_usual = version.dtype == torch.bfloat16 and reference.is_for_kernels
    if is_usual and version.device.type == "cpu" and (native := kernels()) is not None:
        native.difference(version, reference, out)
        return
    out.copy_(version).sub_(values)
    if progress is not None:
        out.add_(progress)


def add_rounded(base: Tensor, decoded: Tensor, out: Tensor) -> None:
    """out <- bfloat16(base + decoded); base and decoded (m,) float32, out (m,) bfloat16. Overwrites `decoded`."""
    out.copy_(decoded.add_(base).clamp_(-BFLOAT16_MAX, BFLOAT16_MAX))


def refuse_non_finite(values: Tensor) -> None:
    """Raise NotFinite for the first value that is NaN or infinite. Call it only if there is one."""
    index = int(torch.isfinite(values).logical_not_().nonzero()[0])
    raise NotFinite(
        f"element {index} of {values.numel()} is {values[index].item()} and cannot be encoded; "
        "the model has diverged, so check its loss and learning rate"
    )
