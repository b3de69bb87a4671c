"""The encodings' inner loops in C (kernels/). On a CPU they are three to nine times as fast as torch.

`library.py` finds and builds them. They are optional: without them, with DILOCO_NATIVE=0, or on another device, torch
does the work. Encoded bytes are the same; norms and merged sums are rounded in another order, so versions may differ in
their last bits. `python -m diloco_common.codec` says which is in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from diloco_common.codec import library

_Part = tuple[Tensor, int, int]
BLOCK = 256
"""Elements that share a scale; kernels/common.h has it too."""


class Loops:
    """The loops of one encoding. Tensors are contiguous, on the CPU; callers have checked sizes and codes."""

    suffix = ""
    decodes = True
    """Whether they do more than encoding and summing."""

    def __init__(self, library: ctypes.CDLL, head: tuple[int, ...] = (), limits: tuple[float, ...] = ()) -> None:
        """`head`: the first arguments of the functions. `limits`: the limits of the encoder."""
        self._library, self._head, self._limits = library, head, limits

    def encode(self, values: Tensor, plus: Tensor | None, loss: Tensor | None, out: Tensor) -> bool:
        """Encode `values + plus` (n,) float32 into `out` uint8. `loss` gets the error.

        `values` may be bfloat16. So may `plus` and `loss`, if both are. Returns False if an element is not finite.
        """
        encode = self._function("diloco_encode")
        block: int = encode(*self._head, *_encoded(values, plus, loss), *self._limits, out.data_ptr())
        return block < 0

    def check(self, data: Tensor, num_elements: int) -> bool:
        """Whether an encoder could have written this chunk, whose size is already checked."""
        check = self._function("diloco_check")
        return bool(check(*self._head, data.data_ptr(), num_elements, *self._limits[1:]))

    def decode(self, data: Tensor, num_elements: int, start: int, out: Tensor) -> None:
        """`out` (m,) float32 <- elements start..start+m of a chunk."""
        decode = self._function("diloco_decode")
        decode(*self._head, data.data_ptr(), num_elements, start, start + out.numel(), out.data_ptr())

    def accumulate(self, data: Tensor, num_elements: int, start: int, out: Tensor, weight: float) -> None:
        """`out` (m,) float32 += weight * elements start..start+m of a chunk."""
        accumulate = self._function("diloco_accumulate")
        accumulate(*self._head, data.data_ptr(), num_elements, start, start + out.numel(), weight, out.data_ptr())

    def sum_squares(self, data: Tensor, num_elements: int, start: int, stop: int) -> float:
        """Sum of squares of elements start..stop of a chunk, in float64."""
        return float(self._function("diloco_sum_squares")(*self._head, data.data_ptr(), num_elements, start, stop))

    def weighted_sum(self, parts: Sequence[_Part], weights: Sequence[float]) -> WeightedSum:
        """`parts`: (chunk, its number of elements, first element to sum)."""
        sources = (_ChunkSource * len(parts))()
        for i, ((chunk, num_elements, start), weight) in enumerate(zip(parts, weights, strict=True)):
            sources[i] = _ChunkSource(chunk.data_ptr(), num_elements, start, weight)
        return self._sum((*self._head, sources, len(parts)), 0, parts)

    def _sum(self, heads: tuple[Any, ...], start: int, parts: Sequence[_Part]) -> WeightedSum:
        functions = self._function("diloco_sum"), self._function("diloco_sum_nesterov")
        return WeightedSum(*functions, heads, start, [chunk for chunk, _, _ in parts])

    def _function(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._library, name + self.suffix)
        return function


class BlockLoops(Loops):
    """For int8 and int4. `head`: the bits of a code. `limits`: code_max, scale_min, scale_max of the codec."""

    def weighted_sum(self, parts: Sequence[_Part], weights: Sequence[float]) -> WeightedSum:
        """The starts must differ by multiples of BLOCK."""
        sources = (_Summand * len(parts))(*map(partial(_source, self._head[0]), parts, weights))
        start = parts[0][2] % BLOCK
        return self._sum((*self._head, sources, len(parts), start), start, parts)

    def encode_change(self, values: Tensor, base: Tensor, anchor_max: float, out: Tensor, anchor: Tensor) -> bool:
        """`encode` for `values - base`; `anchor` <- base + decoded, saturating; base and anchor (n,) bfloat16."""
        block: int = self._library.diloco_encode_change(
            *self._head, values.data_ptr(), base.data_ptr(), values.numel(), *self._limits, anchor_max, out.data_ptr(),
            anchor.data_ptr(),
        )  # fmt: skip
        return block < 0

    def decode_change(
        self, data: Tensor, base: Tensor, anchor_max: float, after: Tensor,
        reference: tuple[Tensor, Tensor | None] | None, out: Tensor | None,
    ) -> None:  # fmt: skip
        """`after` <- base + decoded, saturating, both (n,) bfloat16; `out` (n,) float32 <- after - reference."""
        self._library.diloco_decode_change(
            *self._head, data.data_ptr(), base.data_ptr(), base.numel(), anchor_max, after.data_ptr(),
            *_addresses(reference), _address(out),
        )  # fmt: skip


class PlainLoops(Loops):
    """For float32 and bfloat16. `head`: the bits of an element. `limits`: the largest magnitude."""

    suffix = "_plain"
    decodes = False

    def sum_squares(self, data: Tensor, num_elements: int, start: int, stop: int) -> float:
        return float(self._library.diloco_sum_squares_plain(*self._head, data.data_ptr(), start, stop))


@dataclass(frozen=True)
class Kernels:
    """The loaded library, with the loops that serve all encodings."""

    path: Path
    library: ctypes.CDLL

    def progress(self, anchor: Tensor, theta: Tensor, out: Tensor, start: int) -> None:
        """`out` (n,) bfloat16 <- anchor (n,) bfloat16 - theta (m,) float32 or bfloat16, from `start` on."""
        count, offset = theta.numel(), start * out.itemsize
        assert start + count <= out.numel() == anchor.numel()
        self.library.diloco_progress(
            anchor.data_ptr() + offset, theta.itemsize, theta.data_ptr(), count, out.data_ptr() + offset
        )

    def difference(self, version: Tensor, reference: tuple[Tensor, Tensor | None], out: Tensor) -> None:
        """`out` (n,) float32 <- version (n,) bfloat16 - reference; see `diloco_common.codec.base.Reference`."""
        self.library.diloco_difference(version.data_ptr(), *_addresses(reference), version.numel(), out.data_ptr())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _encoded(values: Tensor, plus: Tensor | None, loss: Tensor | None) -> list[int]:
    """The encoder's input as arguments: addresses, widths of values and of error feedback, number of elements."""
    width = next((t.itemsize for t in (plus, loss) if t is not None), 4)
    return [values.itemsize, *(_address(t) for t in (values, plus, loss)), width, values.numel()]


def _addresses(reference: tuple[Tensor, Tensor | None] | None) -> tuple[int, int, int]:
    """The address of float32 values, or the addresses of a bfloat16 anchor and the progress since."""
    if reference is None:
        return 0, 0, 0
    values, progress = reference
    assert progress is None or values.itemsize == progress.itemsize == 2
    return (values.data_ptr(), 0, 0) if values.itemsize == 4 else (0, values.data_ptr(), _address(progress))


class _Summand(ctypes.Structure):
    """`struct source` of kernels/merging.c."""

    _fields_ = (("scales", ctypes.c_void_p), ("codes", ctypes.c_void_p), ("weight", ctypes.c_float))


class _ChunkSource(ctypes.Structure):
    """`struct chunk_source` of kernels/merging.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("num_elements", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("weight", ctypes.c_float),
    )


class WeightedSum:
    """A sum over contributions. The kernel that uses it computes it block by block, in registers."""

    def __init__(
        self, add_up: Callable[..., float], step: Callable[..., None], heads: tuple[Any, ...], start: int,
        chunks: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """`heads`: the first arguments of both kernels; start + number of elements follows."""
        self._add_up, self._step, self._heads, self._start = add_up, step, heads, start
        self._chunks = chunks  # keeps them alive

    def into(self, out: Tensor) -> float:
        """`out` (m,) float32 <- the sum; returns the sum of its squares."""
        return self._add_up(*self._heads, self._start + out.numel(), out.data_ptr())

    def squares(self, num_elements: int) -> float:
        return self._add_up(*self._heads, self._start + num_elements, 0)

    def nesterov(self, theta: Tensor, velocity: Tensor, momentum: float, lr: float) -> None:
        """Take a Nesterov step along the sum, in place: theta (m,) float32, velocity (m,) bfloat16."""
        assert velocity.itemsize == 2
        self._step(*self._heads, self._start + theta.numel(), momentum, lr, velocity.data_ptr(), theta.data_ptr())


def _source(bits: int, part: tuple[Tensor, int, int], weight: float) -> _Summand:
    """The addresses of the scale and the codes of the block that contains the part's first element."""
    chunk, num_elements, start = part
    block, num_blocks, address = start // BLOCK, -(-num_elements // BLOCK), chunk.data_ptr()
    return _Summand(
        address + 4 * block, address + 4 * num_blocks + block * BLOCK * (8 if bits == 8 else 4) // 8, weight
    )


def kernels() -> Kernels | None:
    found = find()
    return found if isinstance(found, Kernels) else None


@cache
def find() -> Kernels | str:
    """The kernels, or why they cannot be used and torch does the work."""
    found = library.KERNELS.load()
    if isinstance(found, str):
        return found
    path, loaded = found
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return Kernels(path, loaded)


def origin() -> str:
    """What does the work: "prebuilt" (the kernels) or "torch"."""
    return "torch" if isinstance(find(), str) else "prebuilt"


_INT, _INT64, _FLOAT, _DOUBLE = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_double
_POINTER = ctypes.c_void_p
_RANGE = (_INT, _POINTER, _INT64, _INT64, _INT64)  # bits, chunk, its elements, start, stop
_SUM = (_INT, _POINTER, _INT, _INT64, _INT64)  # bits, sources, how many, start, stop
_SUM_CHUNKS = _POINTER, _INT, _INT64
_LIMITS = (_FLOAT, _FLOAT, _FLOAT)
_ENCODED = (_INT, *[_POINTER] * 3, _INT, _INT64)  # width of values; values, plus, loss; width of these two, how many

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "diloco_encode": (_INT64, _INT, *_ENCODED, *_LIMITS, _POINTER),
    "diloco_check": (_INT, _INT, _POINTER, _INT64, _FLOAT, _FLOAT),
    "diloco_decode": (None, *_RANGE, _POINTER),
    "diloco_accumulate": (None, *_RANGE, _FLOAT, _POINTER),
    "diloco_sum_squares": (_DOUBLE, *_RANGE),
    "diloco_sum": (_DOUBLE, *_SUM, _POINTER),
    "diloco_sum_nesterov": (None, *_SUM, _FLOAT, _FLOAT, _POINTER, _POINTER),
    "diloco_encode_change": (_INT64, _INT, _POINTER, _POINTER, _INT64, *_LIMITS, _FLOAT, _POINTER, _POINTER),
    "diloco_progress": (None, _POINTER, _INT, _POINTER, _INT64, _POINTER),
    "diloco_difference": (None, *[_POINTER] * 4, _INT64, _POINTER),
    "diloco_decode_change": (None, _INT, _POINTER, _POINTER, _INT64, _FLOAT, *[_POINTER] * 5),
    "diloco_encode_plain": (_INT64, _INT, *_ENCODED, _FLOAT, _POINTER),
    "diloco_sum_squares_plain": (_DOUBLE, _INT, _POINTER, _INT64, _INT64),
    "diloco_sum_plain": (_DOUBLE, _INT, *_SUM_CHUNKS, _POINTER),
    "diloco_sum_nesterov_plain": (None, _INT, *_SUM_CHUNKS, _FLOAT, _FLOAT, _POINTER, _POINTER),
}
"""Function -> result type and argument types."""
