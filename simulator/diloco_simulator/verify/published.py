"""The published formulas, implemented independently: the version that must follow from a round's contributions.

The product's codecs read the bytes. Everything else (which bytes count, with which weights, and the outer optimizer)
follows the papers, on whole vectors in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from diloco_common.codec import decode_payload
from diloco_common.settings import OuterSettings
from diloco_common.wire.manifest import Fragment, Piece
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


MergeFormula: TypeAlias = Callable[[Sequence[Tensor], Sequence[float]], Tensor]
"""Vectors, float64 (n,), and their shares, which add up to 1 -> the merged vector."""


def mean(vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """sum s v"""
    return torch.stack([share * v for share, v in zip(shares, vectors, strict=True)]).sum(0)


def agreement(vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """(1 - c / 2) sum s v, where c is the mean cosine of two of the s v, weighted by their lengths; c >= 0."""
    pairs = list(itertools.combinations([share * v for share, v in zip(shares, vectors, strict=True)], 2))
    lengths = sum(float(v.norm() * w.norm()) for v, w in pairs)
    cosine = sum(float(v @ w) for v, w in pairs) / lengths if lengths > 0 else 0.0
    return (1 - max(0.0, cosine) / 2) * mean(vectors, shares)


def rda(vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """(sum s |v|) unit(sum s unit(v)); the mean, if the directions cancel each other."""
    norms = [float(v.norm()) for v in vectors]
    radius = sum(share * norm for share, norm in zip(shares, norms, strict=True))
    direction = mean([v / norm if norm > 0 else v for v, norm in zip(vectors, norms, strict=True)], shares)
    length = float(direction.norm())
    return radius * direction / length if length > 1e-6 else mean(vectors, shares)


FORMULAS: Mapping[str, MergeFormula] = {"mean": mean, "agreement": agreement, "rda": rda}


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
    shares = shares_of(contributions)
    doublings = -math.log2(sum(share * share for share in shares))
    return min(0.7, max(0.0, doublings / (doublings + {"agreement": 1}.get(rule, 2))))


def shares_of(contributions: Sequence[Contribution]) -> list[float]:
    """tokens^2 / steps, as shares of the sum."""
    weights = [c.tokens**2 / c.steps for c in contributions]
    return [weight / sum(weights) for weight in weights]


def merged(contributions: Sequence[Contribution], pieces: Sequence[Piece], rule: str) -> Tensor:
    """The merged pseudo-gradient of a fragment, float32 (num_elements,)."""
    shares, vectors = shares_of(contributions), [decoded(c) for c in contributions]
    parts = []
    for i, piece in enumerate(pieces):
        held = [vector[piece.bounds] for vector in vectors]
        for c, vector in zip(contributions, held, strict=True):
            norm = float(vector.norm())
            assert math.isclose(c.piece_norms[i], norm, rel_tol=1e-4, abs_tol=1e-12), f"{c.learner_id}: norm {norm}"
        formula = FORMULAS["mean" if piece.rule == "mean" else rule]
        parts.append(formula([c.kept * vector for c, vector in zip(contributions, held, strict=True)], shares))
    return torch.cat(parts).float()


def decoded(contribution: Contribution) -> Tensor:
    """The values of a contribution, float64 (num_elements,)."""
    payload = contribution.payload
    values = torch.empty(payload.header.num_elements)
    if not isinstance(payload, PartedPayload):
        decode_payload(payload, values)
        return values.double()
    for part in payload.parts:
        of_part = torch.empty(part.payload.header.num_elements)
        decode_payload(part.payload, of_part)
        for span in part.spans:
            values[span.start : span.stop] = of_part[span.start + span.shift : span.stop + span.shift]
    return values.double()


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
        is_exact = settings.sync.merge != "agreement" and settings.outer.optimizer in ("sgd", "nesterov")
        for values, wanted in zip((state.values.theta, *state.values.buffers), expected, strict=False):
            invariants.no_healthy_work_is_cut(fragment_id, values, wanted, is_exact=is_exact)
