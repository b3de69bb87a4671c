"""The manifest: how a model is cut into fragments and placed on shards.

Learners and shards compute the manifest from the tensors, P and the number of shards. So nobody sends the manifest;
only its digest is sent, and it must be the same everywhere. Pure; this file handles no tensor data.

The cut works like this: tensors larger than 1/P of the model are split by rows into pieces. Then each piece goes to the
lightest fragment, largest piece first, ties by name (greedy bin packing). This keeps peak bandwidth low. Fragments go
to shards by the same rule.

Tensors of other kinds (`TRAITS`) are cut and placed by the same rule, each kind separately. Their fragments come after
those of the parameters, which stay the same. A fragment of buffers is no smaller than those of parameters. Buffers that
one rule needs together, or that must come from one learner, share a fragment.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from diloco_common.errors import BadRequest
from diloco_common.wire import bounds

if TYPE_CHECKING:
    from diloco_common.settings import SyncSettings

Kind = Literal["parameter", "momentum", "buffer"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of the tensors of one kind, and of their fragments."""

    is_of_model: bool = False
    """Whether the run trains it: it takes the outer steps of the settings, its tokens and versions are the progress of
    the run, and it stops at the end of the budget. Other kinds take the learners' merged values as long as learners
    train."""
    norms_tell: bool = False
    """Whether an unusual norm means a sick learner. Not for momentum, which begins at zero and grows by any factor."""
    feeds_back: bool = False
    """Whether the encoding error is added to the next contribution. Not for momentum: an inner step forgets a part of
    it, so the next contribution already holds the error."""
    is_exported: bool = True
    """Whether a model file contains it."""
    every: str | None = None
    """The setting in `sync` that gives H of these fragments, as a multiple of the model's H."""
    encoding: str | None = None
    """Encoding on the wire; None: the run's. Counters and variances must not be rounded in blocks."""
    is_whole: bool = False
    """Whether learners contribute values instead of differences. They count until the learner contributes again, and a
    version overwrites them, since nobody knows which part is progress."""

    def times(self, sync: SyncSettings) -> int:
        """H of these fragments, as a multiple of the model's H."""
        return 1 if self.every is None else int(getattr(sync, self.every))


TRAITS: dict[Kind, Traits] = {
    "parameter": Traits(is_of_model=True, norms_tell=True, feeds_back=True),
    "momentum": Traits(is_exported=False, every="companions_every"),
    "buffer": Traits(every="companions_every", encoding="float32", is_whole=True),
}


Rule = Literal["run", "mean", "variance", "most", "one"]
"""How the learners' values of a tensor become one, by weight:

    run        the run's merge rule
    mean       the mean, whatever the run's rule: embeddings and output heads, momentum, most buffers
    variance   of `running_var`: the mean of the variances, plus the variance of the module's `running_mean`
    most       the largest value: counters
    one        the values of the learner with the most weight, for tensors that have no mean
"""
Dtype = Literal["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
"""Dtype of a buffer in the model, restored in exports."""
MEAN, VARIANCE = "running_mean", "running_var"
"""The last part of the names of these buffers."""

Momentum = Literal["Adam", "Muon", "SGD"]
"""Type of the optimizer that keeps the momentum. Only momentum of one type is averaged: Adam (and AdamW) and Muon keep
a mean of gradients, over different times; SGD keeps their sum, which is ten times as long for mu = 0.9."""


class TensorSpec(NamedTuple):
    """One tensor that learners share. A tuple, because models have many and callers send them."""

    name: str
    shape: tuple[int, ...]
    rule: Rule = "run"
    kind: Kind = "parameter"
    dtype: Dtype = "float32"
    """Dtype of a buffer. Parameters and momentum are sent as float32, whatever their local dtype."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def traits(self) -> Traits:
        return TRAITS[self.kind]

    @property
    def mark(self) -> str:
        """What the tensor is, if it is not a parameter; "" for a parameter."""
        if self.kind == "buffer":
            return f"buffer {self.rule} {self.dtype}"
        return "companion" if self.kind == "momentum" else ""

    def as_json(self) -> list[Any]:
        """The form in version files and checkpoints: name, shape, whether the mean merges it; for momentum also true.
        For a buffer: name, shape, rule, dtype."""
        if self.kind == "buffer":
            return [self.name, list(self.shape), self.rule, self.dtype]
        return [self.name, list(self.shape), self.rule == "mean", *([True] if self.kind == "momentum" else [])]


class Tie(NamedTuple):
    """Where the model's state_dict differs from the tensors: a key that is not the name of its tensor."""

    name: bounds.TensorName
    """The key; "": no key has the name in `of`."""
    of: bounds.TensorName
    """Name of the tensor; "": the tensor is not shared."""


BUFFER_RULES: tuple[Rule, ...] = ("mean", "variance", "most", "one")
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def spec_of(entries: Sequence[Any]) -> TensorSpec:
    """The inverse of `as_json`. Raises ValueError."""
    name, shape, rule, *rest = entries
    if not (isinstance(name, str) and isinstance(shape, list | tuple) and all(type(n) is int for n in shape)):
        raise ValueError("a tensor has no name, or no shape")
    match rule, *rest:
        case bool(), *marks if marks in ([], [True]):
            return TensorSpec(name, tuple(shape), "mean" if rule else "run", "momentum" if marks else "parameter")
        case str(), str(dtype):
            return buffer_spec(name, tuple(shape), rule, dtype)
    raise ValueError(f"tensor {name[:64]!r} has entries other than name, shape and kind")


def buffer_spec(name: str, shape: tuple[int, ...], rule: str, dtype: str) -> TensorSpec:
    """A buffer. Raises ValueError for an unknown rule or dtype."""
    if rule in BUFFER_RULES and dtype in DTYPES:
        return TensorSpec(name, shape, rule, "buffer", dtype)
    raise ValueError(f"buffer {name[:64]!r} is merged by {rule[:16]!r}, as {dtype[:16]!r}, which is not known here")


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or rows of one, inside a fragment."""

    tensor: str
    tensor_offset: int
    """Its first element in the flattened tensor."""
    num_elements: int
    offset: int
    """Its first element in the flat fragment."""
    rule: Rule = "run"

    @property
    def tensor_bounds(self) -> slice:
        """Its elements in the flattened tensor."""
        return slice(self.tensor_offset, self.tensor_offset + self.num_elements)

    @property
    def bounds(self) -> slice:
        """Its elements in the flat fragment."""
        return slice(self.offset, self.offset + self.num_elements)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of the model, or of other tensors, that is synchronized on its own. Its pieces lie end to end."""

    fragment_id: int
    shard_index: int
    pieces: tuple[Piece, ...]
    kind: Kind = field(default="parameter", kw_only=True)
    """The kind of all its pieces."""

    @property
    def num_elements(self) -> int:
        return sum(piece.num_elements for piece in self.pieces)

    @property
    def traits(self) -> Traits:
        return TRAITS[self.kind]

    def encoding(self, of_run: str) -> str:
        """The encoding of its values on the wire."""
        return self.traits.encoding or of_run


@dataclass(frozen=True)
class Manifest:
    """The model, and all other kinds of tensors, cut and placed."""

    tensors: tuple[TensorSpec, ...]
    """Sorted by name."""
    fragments: tuple[Fragment, ...]
    """By id: parameters, then momentum, then buffers."""
    num_shards: int
    ties: tuple[Tie, ...] = field(default=(), compare=False)
    """As a learner declared them. No decision depends on them."""

    def owned_by(self, shard_index: int) -> tuple[Fragment, ...]:
        return tuple(f for f in self.fragments if f.shard_index == shard_index)

    @property
    def num_elements(self) -> int:
        return sum(f.num_elements for f in self.model_fragments)

    @cached_property
    def model_fragments(self) -> tuple[Fragment, ...]:
        return tuple(f for f in self.fragments if f.traits.is_of_model)

    @cached_property
    def exported(self) -> tuple[TensorSpec, ...]:
        """Tensors in a file of the model: parameters and buffers."""
        return tuple(t for t in self.tensors if t.traits.is_exported)

    @cached_property
    def exported_fragments(self) -> tuple[Fragment, ...]:
        return tuple(f for f in self.fragments if f.traits.is_exported)

    @cached_property
    def _of_kind(self) -> dict[Kind, tuple[int, int]]:
        """Kind -> its first fragment, and how many fragments it has."""
        kinds = [f.kind for f in self.fragments]
        return {kind: (kinds.index(kind), kinds.count(kind)) for kind in set(kinds)}

    def place(self, fragment: Fragment) -> tuple[int, int]:
        """Its number among the fragments of its kind, and how many of these there are."""
        first, count = self._of_kind[fragment.kind]
        return fragment.fragment_id - first, count

    @cached_property
    def digest(self) -> str:
        """32 hex digits over the tensors, the cut and the placement."""
        lines = [f"shards {self.num_shards}"]
        lines += [f"tensor {t.name!r} {t.shape} {t.rule == 'mean'} {t.mark}".rstrip() for t in self.tensors]
        for fragment in self.fragments:
            lines.append(f"fragment {fragment.fragment_id} {fragment.shard_index}")
            lines += [f"piece {p.tensor!r} {p.tensor_offset} {p.num_elements}" for p in fragment.pieces]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class _TensorRows:
    tensor: TensorSpec
    tensor_offset: int
    num_elements: int


def model_digest(tensors: Iterable[TensorSpec]) -> str:
    """32 hex digits over names, shapes and marks of all tensors, independent of order and cut."""
    return hashlib.sha256(json.dumps(sorted(t.as_json() for t in tensors)).encode()).hexdigest()[:32]


def momentum_of(parameter: str, kind: Momentum) -> str:
    """The name of a parameter's momentum. The type comes last, so that the cut does not depend on it."""
    return f"momentum of {parameter} ({kind})"


def kinds_of(tensors: Iterable[TensorSpec]) -> list[str]:
    """The types of momentum among these tensors, judged by name."""
    kinds = (
        kind for kind in get_args(Momentum) for t in tensors if t.kind == "momentum" and t.name.endswith(f" ({kind})")
    )
    return sorted(set(kinds))


def companion_of(parameter: TensorSpec, kind: Momentum) -> TensorSpec:
    """The momentum of a parameter, as learners declare it."""
    return TensorSpec(momentum_of(parameter.name, kind), parameter.shape, "mean", "momentum")


def mean_of(variance: str) -> str:
    """The name of the running mean that goes with a running variance."""
    return variance.removesuffix(VARIANCE) + MEAN


def check_tensor(tensor: TensorSpec) -> None:
    """Check that the tensor could be sent. Raises BadRequest."""
    bounds.check("Tensor.name", tensor.name, bounds.TENSOR_NAME)
    try:
        bounds.check("Tensor.shape", tensor.shape, bounds.SHAPE)
        for n in tensor.shape:
            bounds.check("Tensor.shape", n, bounds.SIZE)
    except BadRequest as error:
        raise BadRequest(f"the tensor {tensor.name[:64]!r}: {error}") from None


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """Check that the model could be sent. Raises BadRequest."""
    bounds.check("JoinRequest.tensors", tensors, bounds.TENSORS)
    for tensor in tensors:
        check_tensor(tensor)
    elements = sum(tensor.num_elements for tensor in tensors)
    if elements > bounds.ELEMENTS_MAX:
        raise BadRequest(
            f"the tensors have {elements} elements; at most {bounds.number(bounds.ELEMENTS_MAX)} are taken"
        )


def check_kinds(tensors: Sequence[TensorSpec]) -> None:
    """Check that each momentum belongs to a parameter of its shape and is the only one, and that each variance has its
    mean. Raises BadRequest."""
    means = {(t.name, t.shape) for t in tensors if t.kind == "buffer" and t.rule == "mean"}
    if alone := [t.name for t in tensors if t.rule == "variance" and (mean_of(t.name), t.shape) not in means]:
        raise BadRequest(f"the buffer {alone[0][:64]!r} is a variance, but the model has no running mean for it")
    companions = [t for t in tensors if t.kind == "momentum"]
    parameters = [t for t in tensors if t.traits.is_of_model] if companions else []
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
    """Cut a model into at most `num_fragments` fragments and place them on `num_shards` shards; then each other kind.

    A model with fewer pieces gets fewer fragments. Tensors without elements are omitted. Raises ValueError if there is
    nothing to cut, two tensors have the same name, a dimension is negative, or a shard would own no part of the model.
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
    fragments: list[Fragment] = []
    for kind in KINDS:
        of_kind = [t for t in specs if t.kind == kind]
        number = num_fragments
        if kind == "buffer":
            elements, of_model = (sum(t.num_elements for t in specs if t.kind == k) for k in (kind, "parameter"))
            number = max(1, min(number, -(-elements * number // of_model)))
        fragments += _cut(of_kind, number, num_shards, kind, first=len(fragments))
        if not fragments:
            raise ValueError("the model has no trainable elements")
    if len(fragments) > bounds.FRAGMENTS_MAX:
        raise ValueError(
            f"model and companions together have {len(fragments)} fragments; at most "
            f"{bounds.FRAGMENTS_MAX} are taken: set sync.fragments to half of that or less"
        )
    return Manifest(specs, tuple(fragments), num_shards)


def turn(fragment_id: int, num_fragments: int) -> int:
    """The turn of a fragment among P: in [0, P), different for each.

    Neighbors in the manifest are often rows of one tensor, which a single rank may hold. Their turns are about a third
    of a cycle apart, so fragments in flight at once belong to different ranks. With up to six fragments there is no
    such order: the turns are the ids.
    """
    return fragment_id * _stride(num_fragments) % num_fragments


@cache
def _stride(num_fragments: int) -> int:
    """The number nearest to 0.3 P that has no common divisor with P."""
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
    what = spec.mark or ("mean merge" if spec.rule == "mean" else "")
    return f"{list(spec.shape)}{f' ({what})' if what else ''}"


def _cut(
    specs: Sequence[TensorSpec], num_fragments: int, num_shards: int, kind: Kind, *, first: int
) -> tuple[Fragment, ...]:
    """The fragments of these tensors, with ids from `first` on; none without elements. Raises ValueError."""
    target = math.ceil(sum(t.num_elements for t in specs) / num_fragments)
    lots = list(_lots([t for t in specs if t.num_elements], kind, target))
    sizes = {lot: sum(r.num_elements for r in lot) for lot in lots}
    lots.sort(key=lambda lot: (-sizes[lot], lot[0].tensor.name, lot[0].tensor_offset))
    bins = _pack([sizes[lot] for lot in lots], min(num_fragments, len(lots)))
    if lots and len(bins) < num_shards and kind == "parameter":  # check before allocating: a file may claim any number
        raise ValueError(
            f"{num_shards} shards are too many for {len(bins)} fragments: every shard must own at least one"
        )
    homes = _pack_index([sum(sizes[lots[i]] for i in members) for members in bins], num_shards)
    return tuple(
        Fragment(first + number, homes[number], _lay_out([r for i in members for r in lots[i]]), kind=kind)
        for number, members in enumerate(bins)
    )


def _lots(specs: Sequence[TensorSpec], kind: Kind, target: int) -> Iterator[tuple[_TensorRows, ...]]:
    """Groups of pieces that stay together: one piece each, but all buffers of a module that are not just averaged."""
    means = {mean_of(t.name) for t in specs if t.rule == "variance"}
    modules: dict[str, list[_TensorRows]] = {}
    for t in specs:
        if kind == "buffer" and (t.rule != "mean" or t.name in means):
            modules.setdefault(t.name.rpartition(".")[0], []).append(_TensorRows(t, 0, t.num_elements))
        else:
            yield from ((rows,) for rows in _split(t, target))
    yield from map(tuple, modules.values())


def _split(tensor: TensorSpec, target: int) -> list[_TensorRows]:
    """Split a tensor by rows into nearly equal pieces of at most about `target` elements."""
    rows = tensor.shape[0] if tensor.shape else 1
    row = tensor.num_elements // rows
    parts = min(rows, math.ceil(tensor.num_elements / target))
    bounds = [rows * i // parts for i in range(parts + 1)]
    return [_TensorRows(tensor, a * row, (b - a) * row) for a, b in itertools.pairwise(bounds)]


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


def _lay_out(rows: Sequence[_TensorRows]) -> tuple[Piece, ...]:
    """Lay pieces end to end in a fragment, by name."""
    pieces, offset = [], 0
    for r in sorted(rows, key=lambda r: (r.tensor.name, r.tensor_offset)):
        pieces.append(Piece(r.tensor.name, r.tensor_offset, r.num_elements, offset, r.tensor.rule))
        offset += r.num_elements
    return tuple(pieces)
