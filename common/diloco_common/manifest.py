"""The manifest: how a model is cut into fragments and placed on shards.

Learners and shards compute the manifest from the tensors, P and the number of shards. So the manifest never travels;
only its digest does, and it must agree everywhere. Pure; no tensor data here.

The cut: tensors larger than 1/P of the model are split by rows into pieces. Then each piece goes to the lightest
fragment, largest piece first, ties by name (greedy bin packing). This keeps the peak of bandwidth low. Fragments go to
shards by the same rule.

Companion tensors (the momentum of inner optimizers) are cut and placed by the same rule, apart from the model: their
fragments come after those of the model, which are what they would be without companions.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, get_args

from diloco_common import bounds
from diloco_common.errors import BadRequest

Momentum = Literal["Adam", "Muon", "SGD"]
"""Whose momentum a companion is. Averaged are only values of one kind: Adam (and AdamW) and Muon keep a mean of
gradients, over different times; SGD keeps their sum, which with mu = 0.9 is ten times as long."""


class TensorSpec(NamedTuple):
    """One trainable parameter of the model, or a companion of one. A tuple, because models have many and callers send
    them."""

    name: str
    shape: tuple[int, ...]
    mean_merge: bool = False
    """Merged by plain weighted mean, whatever the run's merge rule (embeddings and output heads)."""
    companion: bool = False
    """No parameter, but what an inner optimizer keeps for one, and learners average: it takes no outer step."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def as_json(self) -> list[Any]:
        """As version files and checkpoints have it. A parameter has no fourth entry, so files of models without
        companions are what they were."""
        return [self.name, list(self.shape), self.mean_merge, *([True] if self.companion else [])]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or rows of one, inside a fragment."""

    tensor: str
    tensor_offset: int
    """First element, in the flattened tensor."""
    num_elements: int
    offset: int
    """First element, in the flat fragment."""
    mean_merge: bool

    @property
    def tensor_bounds(self) -> slice:
        """Its elements, in the flattened tensor."""
        return slice(self.tensor_offset, self.tensor_offset + self.num_elements)

    @property
    def bounds(self) -> slice:
        """Its elements, in the flat fragment."""
        return slice(self.offset, self.offset + self.num_elements)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of the model that is synchronised on its own, or one of its companions. Its pieces lie end to end."""

    fragment_id: int
    shard_index: int
    pieces: tuple[Piece, ...]
    companion: bool = field(default=False, kw_only=True)
    """All its pieces are of companion tensors; else none is."""

    @property
    def num_elements(self) -> int:
        return sum(piece.num_elements for piece in self.pieces)


@dataclass(frozen=True)
class Manifest:
    """The whole model and its companions, cut and placed."""

    tensors: tuple[TensorSpec, ...]
    """Sorted by name."""
    fragments: tuple[Fragment, ...]
    """By id: those of the model, then those of companions."""
    num_shards: int

    def owned_by(self, shard_index: int) -> tuple[Fragment, ...]:
        return tuple(f for f in self.fragments if f.shard_index == shard_index)

    @property
    def num_elements(self) -> int:
        """Of the model."""
        return sum(f.num_elements for f in self.model_fragments)

    @cached_property
    def model_tensors(self) -> tuple[TensorSpec, ...]:
        """Without companions."""
        return tuple(t for t in self.tensors if not t.companion)

    @cached_property
    def model_fragments(self) -> tuple[Fragment, ...]:
        """Without those of companions."""
        return tuple(f for f in self.fragments if not f.companion)

    def place(self, fragment: Fragment) -> tuple[int, int]:
        """Its number among the fragments of the model, or among those of companions, and how many of these there
        are."""
        first = len(self.model_fragments)
        if fragment.companion:
            return fragment.fragment_id - first, len(self.fragments) - first
        return fragment.fragment_id, first

    @cached_property
    def digest(self) -> str:
        """32 hex digits over the tensors, the cut and the placement."""
        lines = [f"shards {self.num_shards}"]
        lines += [f"tensor {t.name!r} {t.shape} {t.mean_merge}{' companion' * t.companion}" for t in self.tensors]
        for fragment in self.fragments:
            lines.append(f"fragment {fragment.fragment_id} {fragment.shard_index}")
            lines += [f"piece {p.tensor!r} {p.tensor_offset} {p.num_elements}" for p in fragment.pieces]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A piece that is not yet assigned to a fragment."""

    tensor: TensorSpec
    tensor_offset: int
    num_elements: int


def model_digest(tensors: Iterable[TensorSpec]) -> str:
    """32 hex digits over names, shapes and marks of a model and its companions, in any order, however it is cut."""
    return hashlib.sha256(json.dumps(sorted(t.as_json() for t in tensors)).encode()).hexdigest()[:32]


def momentum_of(parameter: str, kind: Momentum) -> str:
    """What the companion of a parameter is called. The kind comes last, so the cut does not depend on it."""
    return f"momentum of {parameter} ({kind})"


def kinds_of(tensors: Iterable[TensorSpec]) -> list[str]:
    """Whose momentum the companions among these tensors are, by their names."""
    kinds = (kind for kind in get_args(Momentum) for t in tensors if t.companion and t.name.endswith(f" ({kind})"))
    return sorted(set(kinds))


def companion_of(parameter: TensorSpec, kind: Momentum) -> TensorSpec:
    """Its momentum, as learners declare it."""
    return TensorSpec(momentum_of(parameter.name, kind), parameter.shape, mean_merge=True, companion=True)


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """The model is one that could be sent. Raises BadRequest."""
    bounds.check("JoinRequest", "tensors", tensors)
    for tensor in tensors:
        bounds.check("Tensor", "name", tensor.name)
        bounds.check("Tensor", "shape", tensor.shape)
        for n in tensor.shape:
            bounds.check("Tensor", "shape[]", n)
    elements = sum(tensor.num_elements for tensor in tensors)
    if elements > bounds.ELEMENTS_MAX:
        raise BadRequest(
            f"the tensors have {elements} elements; at most {bounds.number(bounds.ELEMENTS_MAX)} are taken"
        )


def check_companions(tensors: Sequence[TensorSpec]) -> None:
    """Each companion is the momentum of a parameter of its shape, and the only one. Raises BadRequest."""
    companions = [t for t in tensors if t.companion]
    parameters = [t for t in tensors if not t.companion] if companions else []
    known = {(momentum_of(t.name, kind), t.shape): t.name for t in parameters for kind in get_args(Momentum)}
    taken: dict[str, TensorSpec] = {}
    for companion in companions:
        of = known.get((companion.name, companion.shape))
        if of is None:
            raise BadRequest(
                f"the companion {companion.name[:64]!r} is the momentum of no parameter of shape "
                f"{list(companion.shape)}; bring those that join(companions=) makes of the model's optimizers"
            )
        if taken.setdefault(of, companion).name != companion.name:
            raise BadRequest(
                f"{taken[of].name[:64]!r} and {companion.name[:64]!r} are of one parameter; bring one for each"
            )


def cut(tensors: Sequence[TensorSpec], num_fragments: int, num_shards: int) -> Manifest:
    """Cut a model into at most `num_fragments` fragments and place them on `num_shards` shards; then its companions.

    A model with fewer pieces gives fewer fragments. Tensors without elements are left out. Raises ValueError if there
    is nothing to cut, two tensors have one name, a dimension is negative, or a shard would own nothing of the model.
    """
    if not 1 <= num_fragments <= bounds.FRAGMENTS_MAX or num_shards < 1:
        raise ValueError(
            f"num_fragments must be 1 to {bounds.FRAGMENTS_MAX} and num_shards at least 1, "
            f"got {num_fragments} and {num_shards}"
        )
    specs = tuple(sorted(tensors, key=lambda t: t.name))
    names = [t.name for t in specs]
    if twice := sorted({a for a, b in itertools.pairwise(names) if a == b}):
        raise ValueError(f"two tensors have the same name: {twice[:3]}")
    if negative := [t for t in specs if any(n < 0 for n in t.shape)]:
        raise ValueError(f"tensor {negative[0].name!r} has shape {list(negative[0].shape)}")
    model = _cut([t for t in specs if not t.companion], num_fragments, num_shards)
    if not model:
        raise ValueError("the model has no trainable elements")
    companions = _cut([t for t in specs if t.companion], num_fragments, num_shards, first=len(model), companion=True)
    if len(model) + len(companions) > bounds.FRAGMENTS_MAX:
        raise ValueError(
            f"model and companions have {len(model) + len(companions)} fragments together; at most "
            f"{bounds.FRAGMENTS_MAX} are taken: set sync.fragments to half of that or less"
        )
    return Manifest(specs, model + companions, num_shards)


def turn(fragment_id: int, num_fragments: int) -> int:
    """When a fragment is synchronised among P: in [0, P), another one for each.

    Neighbours in the manifest are often rows of one tensor, which one rank of an island holds alone. Their turns are
    about a third of a cycle apart, so fragments that are under way at once belong to different ranks. With
    up to six fragments there is no such order: turns are the ids.
    """
    return fragment_id * _stride(num_fragments) % num_fragments


@cache
def _stride(num_fragments: int) -> int:
    """Has no divisor in common with P; of such the nearest to 0.3 P."""
    strides = (n for n in range(1, num_fragments + 1) if math.gcd(n, num_fragments) == 1)
    return min(strides, key=lambda n: abs(n - 0.3 * num_fragments))


def differences(mine: Sequence[TensorSpec], theirs: Sequence[TensorSpec], limit: int = 5) -> list[str]:
    """The first `limit` differences between two models, as lines `name: mine <-> theirs`."""
    odd = set(mine) ^ set(theirs)
    if not odd:
        return []
    names = {tensor.name for tensor in odd}
    shown = set(heapq.nsmallest(limit, names))
    left, right = ({t.name: t for t in tensors if t.name in shown} for tensors in (mine, theirs))
    lines = [f"{name}: {_describe(left.get(name))} <-> {_describe(right.get(name))}" for name in sorted(shown)]
    more = len(names) - limit
    return lines + ([f"and {more} more"] if more > 0 else [])


def _describe(spec: TensorSpec | None) -> str:
    if spec is None:
        return "absent"
    return f"{list(spec.shape)}{' (companion)' if spec.companion else ' (mean merge)' if spec.mean_merge else ''}"


def _cut(
    specs: Sequence[TensorSpec], num_fragments: int, num_shards: int, *, first: int = 0, companion: bool = False
) -> tuple[Fragment, ...]:
    """The fragments of these tensors, with ids from `first` on. None, if they have no elements. Raises ValueError."""
    target = math.ceil(sum(t.num_elements for t in specs) / num_fragments)
    pieces = [rows for t in specs if t.num_elements for rows in _split(t, target)]
    pieces.sort(key=lambda r: (-r.num_elements, r.tensor.name, r.tensor_offset))
    bins = _pack([r.num_elements for r in pieces], min(num_fragments, len(pieces)))
    if pieces and len(bins) < num_shards and not companion:  # before shards are made: a file may claim any number
        raise ValueError(
            f"{num_shards} shards are too many for {len(bins)} fragments: every shard must own at least one"
        )
    homes = _pack_index([sum(pieces[i].num_elements for i in members) for members in bins], num_shards)
    return tuple(
        Fragment(first + number, homes[number], _lay_out([pieces[i] for i in members]), companion=companion)
        for number, members in enumerate(bins)
    )


def _split(tensor: TensorSpec, target: int) -> list[_Rows]:
    """Split a tensor by rows into nearly equal pieces of at most about `target` elements."""
    rows = tensor.shape[0] if tensor.shape else 1
    row = tensor.num_elements // rows
    parts = min(rows, math.ceil(tensor.num_elements / target))
    bounds = [rows * i // parts for i in range(parts + 1)]
    return [_Rows(tensor, a * row, (b - a) * row) for a, b in itertools.pairwise(bounds)]


def _pack(sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Put each item into the lightest bin (lowest index on ties), in the given order."""
    loads = [(0, index) for index in range(num_bins)]  # a heap
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item, size in enumerate(sizes):
        load, lightest = loads[0]
        heapq.heapreplace(loads, (load + size, lightest))
        bins[lightest].append(item)
    return bins


def _pack_index(sizes: Sequence[int], num_bins: int) -> list[int]:
    """The bin of each item. Items are placed in descending size, ties by index."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    homes = [0] * len(sizes)
    for bin_index, members in enumerate(_pack([sizes[i] for i in order], num_bins)):
        for position in members:
            homes[order[position]] = bin_index
    return homes


def _lay_out(rows: Sequence[_Rows]) -> tuple[Piece, ...]:
    """Lay pieces end to end in a fragment, by name."""
    pieces, offset = [], 0
    for r in sorted(rows, key=lambda r: (r.tensor.name, r.tensor_offset)):
        pieces.append(Piece(r.tensor.name, r.tensor_offset, r.num_elements, offset, r.tensor.mean_merge))
        offset += r.num_elements
    return tuple(pieces)
