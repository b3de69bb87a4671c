"""Carries a trace out for many runs at once: what the cores have decided, with the arithmetic of real training.

Runs of one trace may differ in their seed, rates, outer step and merge rule. The arithmetic is that of production,
element by element (codec blocks of 256, bfloat16 anchors, snapshots and residuals, error feedback, carry, mean and RDA,
Nesterov), for all runs in one operation. Nothing is refused here for its norm. `tests/unit/test_lab_replay.py` holds it
against `lockstep.py`.

Shapes: L learners, S runs, F elements of a fragment; row `learner * S + run` of the stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diloco_common.codec.base import BLOCK_ELEMENTS
from diloco_common.codec.blocks import Int4, Int8
from diloco_common.settings import Settings
from diloco_common.wire.manifest import Fragment, momentum_of
from diloco_demo.training import share_at
from diloco_lab.stacked import Stack
from diloco_lab.streams import Streams
from diloco_lab.trace import Adopt, Apply, Begin, Carried, Event, Merge, Snapshot, Steps, Trace
from diloco_server.core.merge import AGREED, CANCELLED
from diloco_server.core.outer import BFLOAT16_MU_MAX
from diloco_worker.core.momentum import MOST_OF_OWN

CODE_MAX = {codec.name: codec.code_max for codec in (Int8, Int4)}


class Piece(NamedTuple):
    """A run of elements of one parameter."""

    bounds: slice
    """In the fragment."""
    in_row: slice
    """In a row of the stack."""
    is_mean: bool
    """It is always merged by the mean."""
    parameter: str


@dataclass(frozen=True)
class Place:
    """Where a fragment lies in a row, piece after piece, and what holds for it."""

    fragment: Fragment
    is_momentum: bool
    pieces: Sequence[Piece]

    def of(self, rows: Tensor) -> Tensor:
        """Its elements of these rows: [R, F]. Slices: an index of elements takes ten times as long."""
        return torch.cat([rows[:, piece.in_row] for piece in self.pieces], 1)

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Writes them: [R, F]."""
        for piece in self.pieces:
            rows[:, piece.in_row] = values[:, piece.bounds]

    def add(self, rows: Tensor, values: Tensor) -> None:
        for piece in self.pieces:
            rows[:, piece.in_row] += values[:, piece.bounds]


class Side:
    """What of the parameters, or of the momenta, learners and shards hold: float32, all fragments behind each other."""

    def __init__(self, theta: Tensor, learners: int) -> None:
        rows, size = theta.shape
        self.theta = theta
        """Of the stack: [L S, P]."""
        self.anchor = torch.zeros_like(theta)
        self.residual = torch.zeros_like(theta)
        self.loss = torch.zeros_like(theta)
        self.sent = torch.zeros_like(theta)
        self.reference = torch.zeros_like(theta)
        """Of the contribution under way: what theta was at its snapshot, moved along with versions since."""
        runs = rows // learners
        self.values = torch.zeros(runs, size, device=theta.device)
        """The shards' theta: [S, P]."""
        self.outer = torch.zeros_like(self.values)
        """Momentum of the outer step."""
        self.published = torch.zeros_like(self.values)


class Replay:
    """The runs of one trace."""

    def __init__(
        self, trace: Trace, settings: Sequence[Settings], stack: Stack, streams: Streams, learners: int
    ) -> None:
        """`settings`: of each run. What is not of seeds, rates, merge rule and outer step is alike in all."""
        self.trace, self.settings, self.stack, self.learners = trace, list(settings), stack, learners
        self._streams = streams
        self.runs = len(self.settings)
        device = stack.theta.device
        self.sides = {False: Side(stack.theta, learners), True: Side(stack.momentum, learners)}
        self.places = {f.fragment_id: self._place(f) for f in trace.manifest.fragments}
        sync = self.settings[0].sync
        self._push, self._pull = sync.push, sync.pull
        self._feeds_back = sync.error_feedback
        self._lr = torch.tensor([s.outer.lr for s in self.settings], device=device)[:, None]
        self._mu = torch.tensor([s.outer.momentum for s in self.settings], device=device)[:, None]
        named = [s.sync.merge for s in self.settings]
        self._merged_by = {
            rule: torch.tensor([name == rule for name in named], device=device)[:, None]
            for rule in MERGES
            if rule in named
        }
        self._versions: dict[tuple[int, int], Tensor] = {}
        self._needed = Counter(
            (event.fragment, event.version) for event in trace.events if isinstance(event, Apply | Adopt)
        )
        self._under_way: set[tuple[int, int]] = set()
        self._kinds, self._kind_of = self._schedules()

    @torch.no_grad()
    def run(self, watch: Callable[[float, Tensor], None]) -> Tensor:
        """The global model of each run, float32 [S, P]. `watch` sees it with the progress, before inner steps."""
        self._seed()
        for event in self.trace.events:
            if isinstance(event, Steps):
                watch(event.fraction, self.sides[False].values)
            self._carry_out(event)
        return self.sides[False].values

    # ------------------------------------------------------------ events

    def _carry_out(self, event: Event) -> None:
        match event:
            case Steps():
                self._step(event)
            case Snapshot(learner, fragment):
                self._snapshot(learner, self.places[fragment])
            case Merge():
                self._merge(event, self.places[event.fragment])
            case Apply():
                self._apply(event, self.places[event.fragment])
            case Adopt(learner, fragment, version):
                self._adopt(learner, self.places[fragment], self._take(fragment, version))
            case Carried(learner, fragment):
                self._under_way.discard((learner, fragment))
            case Begin(learner):
                self.stack.begin(self._rows(learner))
                self._under_way = {key for key in self._under_way if key[0] != learner}
                for side in self.sides.values():
                    side.residual[self._rows(learner)] = 0.0

    def _seed(self) -> None:
        for place in self.places.values():
            side = self.sides[place.is_momentum]
            place.put(side.values, place.of(side.theta[: self.runs]))
            published = self._publish(side, place, is_first=True)
            self._versions[place.fragment.fragment_id, 0] = published

    def _step(self, event: Steps) -> None:
        shares = torch.cat([self._share(event.fraction, taken) for taken in event.inner_steps])
        rows = None
        if len(event.learners) < self.learners:
            of_run = torch.arange(self.runs, device=shares.device)
            rows = torch.cat([learner * self.runs + of_run for learner in event.learners])
        self.stack.step(rows, *self._streams.next(rows), shares)

    def _snapshot(self, learner: int, place: Place) -> None:
        side, rows = self.sides[place.is_momentum], self._rows(learner)
        if (learner, place.fragment.fragment_id) in self._under_way:
            return  # a round asks again for the one that is under way
        anchor = place.of(side.anchor[rows])
        progress = anchor - place.of(side.theta[rows])
        if self._push != "float32":
            progress = _bfloat16(progress)
        feeds_back = self._feeds_back and place.fragment.traits.feeds_back
        whole = progress + place.of(side.residual[rows]) if feeds_back else progress
        sent = _through(whole, self._push)
        place.put(side.sent[rows], sent)
        if feeds_back:
            place.put(side.loss[rows], _bfloat16(whole - sent))
        place.put(side.reference[rows], anchor - progress)
        self._under_way.add((learner, place.fragment.fragment_id))

    def _merge(self, event: Merge, place: Place) -> None:
        side = self.sides[place.is_momentum]
        sent = torch.stack([place.of(side.sent[self._rows(learner)]) for learner in sorted(event.weights)])
        weights = torch.tensor([event.weights[learner] for learner in sorted(event.weights)], device=sent.device)
        shares = (weights / weights.sum()).float()
        mean = torch.einsum("l,lsf->sf", shares, sent)
        if place.is_momentum:
            place.add(side.values, -mean)
        else:
            merged = mean
            for rule, runs in self._merged_by.items() if len(shares) > 1 else ():
                merged = torch.where(runs, MERGES[rule](sent, shares, mean, place), merged)
            self._outer_step(side, place, merged)
        self._versions[event.fragment, event.version] = self._publish(side, place)

    def _apply(self, event: Apply, place: Place) -> None:
        side, rows = self.sides[place.is_momentum], self._rows(event.learner)
        new = self._take(event.fragment, event.version)
        key = (event.learner, event.fragment)
        counted_from = side.reference if event.merged else side.anchor
        difference = new - place.of(counted_from[rows])
        self._add(side, place, rows, difference, event.steps)
        if event.merged:
            place.put(side.residual[rows], place.of(side.loss[rows]))
            self._under_way.discard(key)
        elif key in self._under_way:
            place.add(side.reference[rows], self._left(place, rows, difference, event.before))
        place.put(side.anchor[rows], new)

    def _adopt(self, learner: int, place: Place, new: Tensor) -> None:
        side, rows = self.sides[place.is_momentum], self._rows(learner)
        place.put(side.theta[rows], new)
        place.put(side.anchor[rows], new)

    # ------------------------------------------------------------ helpers

    def _outer_step(self, side: Side, place: Place, merged: Tensor) -> None:
        """As `diloco_server.core.outer.Nesterov`."""
        moved = self._mu * place.of(side.outer) + merged
        place.put(side.outer, torch.where(self._mu > BFLOAT16_MU_MAX, moved, _bfloat16(moved)))
        place.add(side.values, -self._lr * (merged + self._mu * moved))

    def _rows(self, learner: int) -> slice:
        return slice(learner * self.runs, (learner + 1) * self.runs)

    def _take(self, fragment: int, version: int) -> Tensor:
        """A version, which is forgotten when nobody needs it any more."""
        values = self._versions[fragment, version]
        self._needed[fragment, version] -= 1
        if not self._needed[fragment, version]:
            del self._versions[fragment, version]
        return values

    def _publish(self, side: Side, place: Place, *, is_first: bool = False) -> Tensor:
        values = place.of(side.values)
        if self._pull == "float32":
            published = values
        elif self._pull == "bfloat16" or is_first:
            published = _bfloat16(values)
        else:
            before = place.of(side.published)
            published = _bfloat16(before + _through(values - before, self._pull))
        place.put(side.published, published)
        return published

    def _add(self, side: Side, place: Place, rows: slice, difference: Tensor, steps: int) -> None:
        if not place.is_momentum:
            place.add(side.theta[rows], difference)
            return
        before = place.of(side.theta[rows])
        after = before + self._left(place, rows, difference, steps)
        for bounds, in_row, _, name in place.pieces:
            bound = self.stack.bound(name, rows)
            if bound is not None:
                begin = self.stack.at[name].start
                most = bound[:, in_row.start - begin : in_row.stop - begin]
                after[:, bounds] = after[:, bounds].clamp(-most, most)
                continue
            own = torch.linalg.vector_norm(before[:, bounds], dim=1, keepdim=True)
            share = (MOST_OF_OWN * own / torch.linalg.vector_norm(after[:, bounds], dim=1, keepdim=True)).clamp(max=1.0)
            after[:, bounds] = (after[:, bounds] * torch.where(own > 0, share, 1.0)).nan_to_num(0.0, 0.0, 0.0)
        place.put(side.theta[rows], after)

    def _left(self, place: Place, rows: slice, difference: Tensor, steps: int) -> Tensor:
        if not place.is_momentum:
            return difference
        left = difference.clone()
        for bounds, _, _, name in place.pieces:
            left[:, bounds] *= (self.stack.keeps(name, rows) ** steps)[:, None]
        return left

    def _place(self, fragment: Fragment) -> Place:
        """Pieces of a momentum lie where its parameter does."""
        of = {momentum_of(name, kind): name for name in self.stack.at for kind in ("Adam", "Muon")}
        pieces = []
        for piece in fragment.pieces:
            name = of.get(piece.tensor, piece.tensor)
            begin = self.stack.at[name].start + piece.tensor_offset
            in_row = slice(begin, begin + piece.num_elements)
            pieces.append(Piece(piece.bounds, in_row, piece.rule == "mean", name))
        return Place(fragment, fragment.kind == "momentum", pieces)

    def _schedules(self) -> tuple[list[Settings], Tensor]:
        """The different schedules of the runs, and which one each has."""
        keys = [(s.train.schedule, s.train.warmup, s.train.lr_final, s.train.decay) for s in self.settings]
        unique = list(dict.fromkeys(keys))
        kinds = [self.settings[keys.index(key)] for key in unique]
        return kinds, torch.tensor([unique.index(key) for key in keys], device=self.stack.theta.device)

    def _share(self, fraction: float, inner_step: int) -> Tensor:
        """Of the highest rates, run by run: [S]."""
        shares = [
            share_at(fraction=fraction, inner_step=inner_step, budget=1, train=kind.train) for kind in self._kinds
        ]
        return torch.tensor(shares, dtype=torch.float32, device=self._lr.device)[self._kind_of]


def _rda(sent: Tensor, shares: Tensor, mean: Tensor, place: Place) -> Tensor:
    """Radial-directional averaging, piece by piece: [S, F]."""
    merged = mean.clone()
    for bounds, _, is_mean, _ in place.pieces:
        if is_mean:
            continue
        part = sent[:, :, bounds]
        norms = torch.linalg.vector_norm(part, dim=2)  # [L, S]
        radius = (shares[:, None] * norms).sum(0)
        each = torch.where(norms > 0, shares[:, None] / norms, 0.0)
        direction = torch.einsum("ls,lsf->sf", each, part)
        length = torch.linalg.vector_norm(direction, dim=1)
        scaled = direction * (radius / length)[:, None]
        merged[:, bounds] = torch.where((length > CANCELLED)[:, None], scaled, mean[:, bounds])
    return merged


def _agreement(sent: Tensor, shares: Tensor, mean: Tensor, place: Place) -> Tensor:
    """The mean, piece by piece the shorter the more they agree: [S, F]."""
    merged = mean.clone()
    for bounds, _, is_mean, _ in place.pieces:
        if is_mean:
            continue
        lengths = shares[:, None] * torch.linalg.vector_norm(sent[:, :, bounds], dim=2)  # [L, S]
        alone = lengths.square().sum(0)
        pairs = lengths.sum(0).square() - alone
        together = mean[:, bounds].square().sum(1)
        cosine = torch.where(pairs > 0, (together - alone) / pairs, 0.0).clamp(0, 1)
        merged[:, bounds] *= (1 - AGREED * cosine)[:, None]
    return merged


MERGES = {"rda": _rda, "agreement": _agreement}
"""Beside the mean."""


def _bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def _through(values: Tensor, encoding: str) -> Tensor:
    """What is left of values [S, F] that are encoded and decoded."""
    if encoding == "float32":
        return values
    if encoding == "bfloat16":
        return _bfloat16(values)
    size = values.shape[1]
    padded = torch.nn.functional.pad(values, (0, -size % BLOCK_ELEMENTS)).view(len(values), -1, BLOCK_ELEMENTS)
    scale = padded.abs().amax(2, keepdim=True) / CODE_MAX[encoding]
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
    decoded: Tensor = ((padded / scale).round() * scale).flatten(1)[:, :size]
    return decoded
