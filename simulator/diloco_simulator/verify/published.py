"""The published formulas, implemented independently: the version that must follow from a round's contributions.

Only the bytes are read by the product's codecs, whose sums are float32 in the order of learner ids. Everything else
(which bytes, with which weights, and the outer optimizer) follows the papers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco_common.codec import Codec, get_codec
from diloco_common.codec.base import ChunkPart
from diloco_common.settings import OuterSettings
from diloco_common.wire.manifest import Fragment, Piece
from diloco_server.core.merge import AGREED, CANCELLED, MergedSlice, chunk_tensors
from diloco_server.core.parts import PartedPayload
from diloco_server.core.round import Contribution
from diloco_simulator.processes import Processes
from diloco_simulator.verify import invariants
from diloco_simulator.verify.invariants import Taken

LEFT = "LEFT"
"""The code of a goodbye: earlier contributions count."""


@dataclass(frozen=True)
class Before:
    """A fragment before its round is merged."""

    theta: Tensor
    buffers: tuple[Tensor, ...]
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class _Stretch:
    """Elements of the fragment within one chunk of a contribution."""

    start: int
    stop: int
    chunk: Tensor
    chunk_elements: int
    at: int
    """Their start within the chunk."""
    codec: Codec


def next_values(
    before: Before, fragment: Fragment, rule: str, outer: OuterSettings, outer_step: int
) -> tuple[Tensor, ...]:
    """The values of the next version, float32 [num_elements], and the outer optimizer's state."""
    if not fragment.traits.is_of_model:  # the mean of the learners' values
        return (before.theta - merged(before.contributions, fragment.pieces, "mean"),)
    gradient = merged(before.contributions, fragment.pieces, rule)
    mu = followed(before.contributions, rule) if outer.momentum == "auto" else outer.momentum
    return stepped(before.theta, gradient, before.buffers, outer, mu, outer_step)


def followed(contributions: Sequence[Contribution], rule: str) -> float:
    """Outer momentum by the number of merged learners: l / (l + 2) for 2^l of equal weight, 0.7 at most."""
    shares = shares_of(sorted(contributions, key=lambda c: c.learner_id))
    doublings = -math.log2(sum(share * share for share in shares))
    return min(0.7, max(0.0, doublings / (doublings + {"agreement": 1}.get(rule, 2))))


def shares_of(ordered: Sequence[Contribution]) -> list[float]:
    """tokens^2 / steps, as shares of the sum."""
    weights = [c.tokens**2 / c.steps for c in ordered]
    return [weight / sum(weights) for weight in weights]


def merged(contributions: Sequence[Contribution], pieces: Sequence[Piece], rule: str) -> Tensor:
    """The merged pseudo-gradient of a fragment, float32. Sums in the order of learner ids."""
    ordered = sorted(contributions, key=lambda c: c.learner_id)
    stretches, shares = [list(_stretches(c)) for c in ordered], shares_of(ordered)
    parts = []
    for piece in pieces:
        norms = [float(torch.linalg.vector_norm(_decoded(s, piece), dtype=torch.float64)) for s in stretches]
        for c, norm in zip(ordered, norms, strict=True):
            found = c.piece_norms[list(pieces).index(piece)]
            assert math.isclose(found, norm, rel_tol=1e-4, abs_tol=1e-12), f"{c.learner_id}: norm {found}, not {norm}"
        norms = [c.kept * c.piece_norms[list(pieces).index(piece)] for c in ordered]  # as rounded
        parts += _sum(stretches, piece, _weights(stretches, piece, rule, shares, norms, [c.kept for c in ordered]))
    return torch.cat([part.tensor().clone() for part in parts])


def _weights(
    stretches: list[list[_Stretch]], piece: Piece, rule: str, shares: list[float], norms: list[float],
    kept: list[float],
) -> list[float]:  # fmt: skip
    """`norms`: of contributions after cutting."""
    cut = [share * part for share, part in zip(shares, kept, strict=True)]
    if len(shares) == 1 or "mean" in (rule, piece.rule):
        return cut
    if rule == "agreement":
        lengths = [share * norm for share, norm in zip(shares, norms, strict=True)]
        alone, pairs = sum(x * x for x in lengths), 2 * sum(x * y for x, y in itertools.combinations(lengths, 2))
        together = sum(part.sum_squares() for part in _sum(stretches, piece, cut))
        cosine = min(1.0, max(0.0, (together - alone) / pairs)) if pairs > 0 else 0.0
        return [share * (1 - AGREED * cosine) for share in cut]
    radius = sum(share * norm for share, norm in zip(shares, norms, strict=True))
    direction = [share * k / norm if norm > 0 else 0.0 for share, norm, k in zip(shares, norms, kept, strict=True)]
    length = math.sqrt(sum(part.sum_squares() for part in _sum(stretches, piece, direction)))
    return [d * (radius / length) for d in direction] if length > CANCELLED else cut


def stepped(
    theta: Tensor, g: Tensor, buffers: Sequence[Tensor], s: OuterSettings, mu: float, outer_step: int
) -> tuple[Tensor, ...]:
    """theta after one outer step along g, and the optimizer's state."""
    match s.optimizer:
        case "sgd" if not s.momentum:
            return (theta.add(g, alpha=-s.lr),)
        case "sgd":
            b = _momentum(buffers[0], mu, g)
            return theta.add(b, alpha=-s.lr), b.to(buffers[0].dtype)
        case "nesterov":
            b = _momentum(buffers[0], mu, g)
            return theta.add(g.add(b, alpha=mu), alpha=-s.lr), b.to(buffers[0].dtype)
        case "adam":
            first = 0.9 * buffers[0] + 0.1 * g
            second = 0.99 * buffers[1] + 0.01 * g * g
            root = (second / (1 - 0.99**outer_step)).sqrt() + 1e-8
            return theta - s.lr * first / (1 - 0.9**outer_step) / root, first, second
    raise ValueError(s.optimizer)


def _momentum(b: Tensor, mu: float, g: Tensor) -> Tensor:
    return b.float().mul(mu).add(g)


def _stretches(contribution: Contribution) -> Iterator[_Stretch]:
    """The place of each element of the fragment, in ascending order."""
    payload = contribution.payload
    codec = get_codec(payload.header.encoding)
    if not isinstance(payload, PartedPayload):
        for chunk, bounds in zip(chunk_tensors(payload), payload.header.chunk_bounds(), strict=True):
            yield _Stretch(bounds.start, bounds.stop, chunk, bounds.stop - bounds.start, 0, codec)
        return
    found = []
    for part in payload.parts:
        (chunk,) = chunk_tensors(part.payload)  # a rank's part is small here
        for span in part.spans:
            elements = part.payload.header.num_elements
            found.append(_Stretch(span.start, span.stop, chunk, elements, span.start + span.shift, codec))
    yield from sorted(found, key=lambda s: s.start)


def _sum(stretches: list[list[_Stretch]], piece: Piece, weights: Sequence[float]) -> list[MergedSlice]:
    """The weighted sum, cut wherever anybody's chunk or part ends."""
    start, stop = piece.offset, piece.offset + piece.num_elements
    ends = sorted({min(s.stop, stop) for one in stretches for s in one if s.stop > start and s.start < stop})
    sums = []
    for end in ends:
        held = [next(s for s in one if s.start <= start < s.stop) for one in stretches]
        parts = [ChunkPart(s.chunk, s.chunk_elements, s.at + start - s.start) for s in held]
        sums.append(MergedSlice(start, end - start, held[0].codec, parts, weights))
        start = end
    return sums


def _decoded(stretches: list[_Stretch], piece: Piece) -> Tensor:
    """A piece of one contribution, float32 [num_elements]."""
    return torch.cat([part.tensor().clone() for part in _sum([stretches], piece, [1.0])])


class PublishedFormula:
    """Checks versions against the formulas, following shard histories as they are written. For a cluster of members,
    whose work is cut only if it is longer than all other."""

    def __init__(self, cluster: Processes) -> None:
        self._cluster = cluster
        self._accepted: dict[tuple[str, int, int], dict[str, Taken]] = {}
        """Shard, fragment and round -> contributions to be merged."""
        self._merging: dict[tuple[str, int], Before] = {}

    def heard(self, name: str, what: str, facts: dict[str, Any]) -> None:
        match what:
            case "born" if facts["role"] == "shard":
                self._accepted = {key: taken for key, taken in self._accepted.items() if key[0] != name}
                self._merging = {key: before for key, before in self._merging.items() if key[0] != name}
            case "accepted":
                taken = facts["generation"], facts["tokens"], facts["steps"]
                self._accepted.setdefault((name, facts["fragment"], facts["round"]), {})[facts["learner"]] = taken
            case "gone" if facts["code"] != LEFT:
                self._fence(name, facts["learner"], facts["generation"])
            case "merging":
                self._begin(name, facts)
            case "announced":
                self._end(name, facts["fragment"])

    def _fence(self, name: str, learner_id: str, generation: int) -> None:
        for key, taken in self._accepted.items():
            if key[0] == name and learner_id in taken and taken[learner_id][0] == generation:
                del taken[learner_id]

    def _begin(self, name: str, facts: dict[str, Any]) -> None:
        fragment_id, left_out = facts["fragment"], [c["learner"] for c in facts.get("left_out", ())]
        accepted = self._accepted.pop((name, fragment_id, facts["version"]), {})
        held = {c["learner"]: (c["generation"], c["tokens"], c["steps"]) for c in facts["contributions"]}
        invariants.accepted_work_is_merged(fragment_id, accepted, held, left_out)
        state = self._cluster.fragment(name, fragment_id)
        assert state.closed is not None
        assert state.values is not None
        invariants.rounds_wait_for_their_quorum(state, state.closed, self._cluster.options.quorum)
        values, contributions = state.values, tuple(state.closed.parted()[0])
        if state.fragment.kind == "buffer":
            return  # the values count nothing here
        invariants.only_the_longest_is_cut(fragment_id, [(c.norm, c.steps, c.kept) for c in contributions])
        buffers = tuple(buffer.clone() for buffer in values.buffers)
        self._merging[name, fragment_id] = Before(values.theta.clone(), buffers, contributions)

    def _end(self, name: str, fragment_id: int) -> None:
        state, before = self._cluster.fragment(name, fragment_id), self._merging.pop((name, fragment_id), None)
        if before is None:
            return
        assert state.values is not None
        settings = self._cluster.options.settings[0]
        expected = next_values(before, state.fragment, settings.sync.merge, settings.outer, state.version)
        is_exact = settings.outer.optimizer in ("sgd", "nesterov") or not state.fragment.traits.is_of_model
        for values, wanted in zip((state.values.theta, *state.values.buffers), expected, strict=False):
            invariants.no_healthy_work_is_cut(fragment_id, values, wanted, is_exact=is_exact)
