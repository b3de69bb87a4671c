"""Detects inner steps that undo the versions applied before them.

Some optimizers step on a copy of the weights (float32 masters, the slow weights of Lookahead) and write it over the
parameters. That undoes every version, and the learner contributes the undoing: the global model ends up worse than
untrained. Such copies must get versions, too (`join(masters=...)`).

Some elements of an applied version are watched over the next inner steps. With d, the change of these elements by the
version, and s, their change by one step, that step has taken back the share  -<s, d> / <d, d>  of the version: 1 for
masters, 0.5 for Lookahead. It has undone the version if the share is at least `SHARE`, and at least `STANDS_OUT` times
the length of the usual step: training that oscillates does so evenly. Only `IN_A_ROW` such versions in succession are
reported. Even this is a guess: a loop that keeps its parameters in a set takes back the part of a version that lies
outside. So it is logged and counted, but ends nothing. Measured: 36 of 36 trials with such an optimizer were found, and
none of 80 others.

Nothing waits for a device: the shares are read once they are on the CPU, a step or more later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from diloco_common.wire.manifest import Fragment
from diloco_worker.core import device, layout

ROW = 64
"""Elements watched at once: in the middle of the largest tensor of a fragment, if that has so many."""
STEPS = 10
"""Inner steps to watch after a version, unless the next one comes earlier. Lookahead writes its slow weights every 5, 6
or 10."""
SHARE, STANDS_OUT, IN_A_ROW = 0.35, 1.5, 3
"""See above: below the 0.5 of Lookahead; above the scatter of steps; so that chance needs three coincidences."""
FINDING = "inner steps undo one version after another: this model keeps nothing that others train"
COPIES = "if the optimizer steps on a copy of the weights (float32 masters, Lookahead): join(masters=optimizer)"
CLAMPS = "if the loop clamps or projects the parameters: join(after_version=f)"


class Watched(NamedTuple):
    fragment_id: int
    taken_back: Tensor
    """See `taken_back`."""
    are_there: Callable[[], bool]
    """Whether the numbers have arrived on the CPU."""


class VersionWatch:
    """Watches whether versions stay in the parameters of one model. Owned by the training thread."""

    def __init__(self, theta: Callable[[str], Tensor]) -> None:
        """`theta` returns the current tensor of a name."""
        self._theta = theta
        self._fragment_id = -1
        self._row: tuple[Tensor, int, int] | None = None  # a tensor, and the bounds of the elements
        self._seen: list[Tensor] = []
        """The elements before the version that is watched, with it, and after each inner step; empty: none is."""
        self._coming: list[Watched] = []
        self._in_a_row = 0
        self._of_fragment: Counter[int] = Counter()  # the same, of one fragment: a loop may copy only some
        self.undone = 0
        """Versions that inner steps have undone; 0 until `IN_A_ROW` were in succession."""

    @contextmanager
    def under(self, fragment: Fragment) -> Iterator[None]:
        """A `with` block in which a version of the fragment is applied."""
        if fragment.fragment_id == self._fragment_id:
            self._end()
        if not self._seen and fragment.traits.is_of_model:
            self._fragment_id, self._row = fragment.fragment_id, self._row_of(fragment)
            self._look()
            yield
            self._look()
        else:
            yield

    def settled(self) -> None:
        """The loop has changed the model since: its values now count as the version."""
        if len(self._seen) == 2:
            self._seen.pop()
            self._look()

    def check(self) -> bool:
        """Call after every inner step, before versions are applied. True once, when steps are found to undo them."""
        before = self.undone
        if self._seen:
            self._look()
            if len(self._seen) == STEPS + 2:
                self._end()
        while self._coming and self._coming[0].are_there():
            self._count(self._coming.pop(0))
        return before < IN_A_ROW <= self.undone

    def _count(self, watched: Watched) -> None:
        shares, lengths = watched.taken_back.tolist()
        if math.isnan(shares[0]):  # the version changed none of the elements, such as the row of an unused word
            return
        gone = is_undone(shares, lengths)
        self._in_a_row = self._in_a_row + 1 if gone else 0
        of_fragment = self._of_fragment[watched.fragment_id] + 1 if gone else 0
        self._of_fragment[watched.fragment_id] = of_fragment
        if max(self._in_a_row, of_fragment) == IN_A_ROW > self.undone:
            self.undone = IN_A_ROW
        elif gone and self.undone:
            self.undone += 1

    def _look(self) -> None:
        if self._row is not None:
            self._seen.append(layout.flat(*self._row).clone())

    def _end(self) -> None:
        """End the watch, and send what its steps took back to the CPU."""
        seen, self._seen = self._seen, []
        if len(seen) - 2 > STEPS // 4:  # fewer steps prove nothing
            told = device.on_its_way(taken_back(torch.stack(seen).float()))
            self._coming.append(Watched(self._fragment_id, *told))
        self._fragment_id = -1

    def _row_of(self, fragment: Fragment) -> tuple[Tensor, int, int] | None:
        """The elements to watch. They are lost from view if the loop gives the parameter new storage meanwhile."""
        piece = max(fragment.pieces, key=lambda piece: piece.num_elements, default=None)
        if piece is None or piece.num_elements < ROW:
            return None
        first = piece.tensor_offset + (piece.num_elements - ROW) // 2
        return self._theta(piece.tensor), first, first + ROW


def taken_back(seen: Tensor) -> Tensor:
    """For each step, the share of the version that it took back, and its length as a multiple of the version's:
    float32 [2, steps], from [steps + 2, elements]."""
    laid, steps = seen[1] - seen[0], seen[1:-1] - seen[2:]
    return torch.stack([steps @ laid / laid.square().sum(), steps.norm(dim=1) / laid.norm()])


def is_undone(shares: Sequence[float], lengths: Sequence[float]) -> bool:
    return max(shares) >= max(SHARE, STANDS_OUT * median(lengths))
