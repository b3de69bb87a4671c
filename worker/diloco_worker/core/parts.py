"""The part of a fragment that one process holds, and the part that it pushes. A lone process holds and pushes all.

    held    the elements in the rank's own tensors: all of them under DDP, rows of each tensor under FSDP2
    own     the elements that the rank pushes: ranks that hold the same elements split them in whole blocks

Both are laid out by `diloco_common/codec/parts.py`, so blocks begin where those of the whole fragment begin. `own` is
one slice of `held`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.parts import num_elements, spans
from diloco_common.errors import UnsupportedModel
from diloco_common.wire.manifest import Fragment, Piece, TensorSpec
from diloco_common.wire.messages import Range

SUPPORTED = (
    "islands take DistributedDataParallel, and fully_shard (FSDP2) on a mesh of one dimension, or of two (HSDP), whose "
    "parameters are Replicate or Shard(0)"
)


@dataclass(frozen=True, slots=True)
class Holding:
    """The elements of one flattened tensor that a rank holds: start to stop - 1."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """Number of ranks that hold the same elements, and the index of this rank among them."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class LocalFragment(Fragment):
    """A fragment as one rank has it. Its pieces name elements of the rank's own tensors, and their places in `held`."""

    size: int
    """Elements held, and zeros between them."""
    ranges: tuple[Range, ...]
    """The held ranges of the fragment; empty: all of it, unless `size` is 0."""
    own: slice
    """The slice of the held elements that this rank pushes."""
    own_ranges: tuple[Range, ...]
    """The same elements as ranges of the fragment."""
    part: int
    num_parts: int

    @property
    def num_elements(self) -> int:
        return self.size


class Seat(NamedTuple):
    """The place of one process in its island."""

    rank: int = 0
    size: int = 1
    located: Callable[[Tensor], tuple[Holding, Sharing]] | None = None
    """Tells what this rank holds of a DTensor. Raises UnsupportedModel."""

    def holding(self, parameters: Mapping[str, Tensor], specs: Iterable[TensorSpec]) -> HeldByRank:
        """The part of these parameters, and of everything synchronized, in this rank. Raises UnsupportedModel."""
        whole = Sharing(self.rank, self.size)
        holdings = {spec.name: Holding(0, spec.num_elements) for spec in specs}
        tensors, sharings = dict(parameters), dict.fromkeys(parameters, whole)
        for name, parameter in parameters.items():
            if self.located is not None and is_dtensor(parameter):
                holdings[name], sharings[name] = self.located(parameter)
                with torch.no_grad():
                    tensors[name] = local = parameter.detach().to_local()  # type: ignore[attr-defined]
                if not local.is_contiguous():
                    raise UnsupportedModel(f"this rank's rows of {name} are not contiguous; {SUPPORTED}")
        return HeldByRank(
            self, tensors, holdings, _the_same(sharings), whole, any(map(is_dtensor, parameters.values()))
        )


ALONE = Seat()


@dataclass(frozen=True, slots=True)
class HeldByRank:
    seat: Seat
    tensors: Mapping[str, Tensor]
    holdings: Mapping[str, Holding]
    sharing: Sharing
    sharing_beside: Sharing
    """How ranks share everything else: each holds all of it, and pushes a part."""
    is_spread: bool
    """Whether other ranks hold parts of the parameters."""

    def of(self, fragment: Fragment) -> LocalFragment:
        sharing = self.sharing if fragment.traits.is_of_model else self.sharing_beside
        return local_fragment(fragment, self.holdings, sharing, self.seat.rank, self.seat.size)


def local_fragment(
    fragment: Fragment, holdings: Mapping[str, Holding], sharing: Sharing, rank: int, size: int
) -> LocalFragment:
    """The part of a fragment in one rank of `size` ranks. `holdings`: by tensor."""
    found = []
    for piece in fragment.pieces:
        held = holdings[piece.tensor]
        start = max(held.start, piece.tensor_offset)
        stop = min(held.stop, piece.tensor_offset + piece.num_elements)
        if start < stop:
            at = piece.offset + start - piece.tensor_offset
            found.append((piece, start - held.start, Range(at, at + stop - start)))
    laid = spans([r for _, _, r in found])
    pieces = tuple(
        Piece(piece.tensor, offset, r.stop - r.start, span.start + span.shift, piece.rule)
        for (piece, offset, r), span in zip(found, laid, strict=True)
    )
    ranges = joined([r for _, _, r in found])
    length = num_elements(ranges)
    own, own_ranges = _share(ranges, length, sharing)
    is_whole = ranges == (Range(0, fragment.num_elements),)
    return LocalFragment(
        fragment.fragment_id,
        fragment.shard_index,
        pieces,
        length,
        () if is_whole else ranges,
        own,
        own_ranges,
        rank,
        size,
        kind=fragment.kind,
    )


def is_dtensor(tensor: Tensor) -> bool:
    """Checks an attribute, since importing the type takes seconds."""
    return hasattr(tensor, "full_tensor")


def located(tensor: Any) -> tuple[Holding, Sharing]:
    """What this rank holds of a DTensor, and how it is shared. Raises ValueError that says what is not supported."""
    index, count = 0, 1
    rows, first, dim = tensor.shape[0] if tensor.dim() else 1, 0, 0
    sharded = 0
    for dim, placement in enumerate(tensor.placements):
        coordinate, ranks = tensor.device_mesh.get_local_rank(dim), tensor.device_mesh.size(dim)
        if placement.is_replicate():
            index, count = index * ranks + coordinate, count * ranks
        elif type(placement).__name__ == "Shard" and placement.dim == 0:
            sharded += 1
            first, rows = torch_chunk(rows, ranks, coordinate)
        else:
            raise ValueError(f"is {placement} on its device mesh")
    if sharded > 1:
        raise ValueError("is sharded over two dimensions of its device mesh")
    row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1
    held = Holding(first * row, (first + rows) * row)
    if held.stop - held.start != tensor.to_local().numel():
        raise ValueError(f"has {tensor.to_local().numel()} elements here, not {held.stop - held.start}")
    return held, Sharing(index, count)


def joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same elements in as few ranges as possible. `ranges`: ascending and disjoint."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1].stop == start:
            found[-1] = Range(found[-1].start, stop)
        else:
            found.append(Range(start, stop))
    return tuple(found)


def _share(ranges: Sequence[Range], length: int, sharing: Sharing) -> tuple[slice, tuple[Range, ...]]:
    """The slice of the held elements that one rank pushes, and its ranges, in whole blocks."""
    blocks = -(-length // BLOCK_ELEMENTS)
    first = blocks * sharing.index // sharing.count * BLOCK_ELEMENTS
    last = min(length, blocks * (sharing.index + 1) // sharing.count * BLOCK_ELEMENTS)
    own = []
    for start, stop, shift in spans(ranges):
        a, b = max(start + shift, first), min(stop + shift, last)
        if a < b:
            own.append(Range(a - shift, b - shift))
    return slice(first, first + num_elements(own)), tuple(own)


def _the_same(sharings: Mapping[str, Sharing]) -> Sharing:
    """Raises UnsupportedModel unless all parameters are spread over the ranks in one way."""
    (name, first), *others = sharings.items()
    for other, sharing in others:
        if sharing != first:
            raise UnsupportedModel(
                f"{name} and {other} are spread over the ranks in different ways ({first.count} and {sharing.count} "
                f"ranks hold the same values); {SUPPORTED}: put fully_shard around the whole model, without "
                "ignored_params"
            )
    return first


def torch_chunk(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first row and the number of rows that a rank holds of a tensor under `Shard(0)`, cut as torch.chunk does."""
    each = -(-rows // ranks)
    first = min(rows, each * rank)
    return first, min(rows - first, each)
