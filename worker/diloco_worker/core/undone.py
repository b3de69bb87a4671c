"""Notices when a version that was laid under the parameters is gone after an inner step.

Some optimizers step on a copy of the weights (float32 masters, the slow weights of Lookahead) and write it over the
parameters. What a learner has put there is then undone at every step, and the learner contributes the undoing: the
global model ends worse than untrained. Copies must get versions, too (`join(masters=...)`).

Of a version that is applied, some elements are watched over the next inner steps. With d, what the version has changed
in them, and s, what a step has changed, one of the steps has undone the version if

    share = -<s, d> / <d, d>             is within [`SHARE_LEAST`, `SHARE_MOST`]: 1 for masters, 0.5 for Lookahead,
    likeness = -<s, d> / (|s| |d|)       is at least `LIKENESS_LEAST`, and
    |s| / median |s| of the other steps  is at least `OUTSTANDING`: training that swings back and forth does so evenly.

Elements are taken by rows, so many of one tensor, as an optimizer may have copies of some tensors only. A version is
gone where most of the rows that it has changed say so, and only `IN_A_ROW` of them, one after the other, are believed.
Even then it is a guess: a loop that keeps its parameters in a set takes back what of a version lies outside. So it is
said and counted, and ends nobody.
How the constants were measured: 24 of 24 trials were found rightly, and none of 30 wrongly. Without the last
condition, 3 of 50 were found wrongly.

Nothing waits for a device: the rows are read when they are on the CPU, a step or more later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from diloco_common.wire.manifest import Fragment
from diloco_worker.core import device, layout

ROWS = 4
"""Tensors of a fragment that are watched at once; with another version, others of them."""
RUNS, RUN = 4, 16
ROW = RUNS * RUN
"""Elements of each: some runs of neighbours, as each run is a miss of the caches at every step. Smaller tensors are not
watched."""
STEPS = 10
"""Inner steps after a version. Lookahead writes its slow weights every 5, 6 or 10."""
STEPS_LEAST = 3
"""If the next version comes earlier, these must do."""
CHANGED_LEAST = 16
"""Elements of a row that a version must have changed, or the row says nothing: an embedding that nobody has used."""
SHARE_LEAST, SHARE_MOST = 0.35, 1.5
LIKENESS_LEAST = 0.7
OUTSTANDING = 2.0
IN_A_ROW = 3
FINDING = "inner steps undo one version after another: this model keeps nothing that others train"
COPIES = "if the optimizer steps on a copy of the weights (float32 masters, Lookahead): join(masters=optimizer)"
CLAMPS = "if the loop clamps or projects the parameters: join(after_version=f)"
REST = 40
"""Inner steps without a watch after a version that stayed: an optimizer that takes versions back does so with all."""

Where = Callable[[str], int]
"""Name of a tensor -> its address."""


class RowPlace(NamedTuple):
    """Where a row is taken from: elements of a tensor."""

    tensor: str
    start: int
    stop: int


class Watched:
    """The version that is watched at the moment."""

    def __init__(
        self, fragment_id: int, places: list[RowPlace], read: Callable[[RowPlace], Tensor], where: Where
    ) -> None:
        """`read` gives a view of a row."""
        self.fragment_id = fragment_id
        self._places = places
        self._read, self._where = read, where
        self._addresses: list[int] = []
        self._views: list[Tensor] = []
        self.seen: list[Tensor] = []
        """The rows before the version, with it, and after each inner step."""

    @property
    def steps(self) -> int:
        return len(self.seen) - 2

    def look(self) -> None:
        """One operation, unless a parameter has another storage by now: this runs at every step."""
        addresses = [self._where(place.tensor) for place in self._places]
        if addresses != self._addresses:
            self._addresses, self._views = addresses, [self._read(place) for place in self._places]
        self.seen.append(torch.stack(self._views))


class Samples(NamedTuple):
    """Of a version that is watched no longer: float32 [steps + 2, rows, ROW] on the CPU, once it is there."""

    fragment_id: int
    values: Tensor
    are_there: Callable[[], bool]


class Laid:
    """Whether what was laid under the parameters of one model stays there. Owned by the training thread."""

    def __init__(self, theta: Callable[[str], Tensor], where: Where) -> None:
        """`theta`: a tensor of the model, as it is now; `where`: its address."""
        self._theta, self._where = theta, where
        self._watched: Watched | None = None
        self._samples: list[Samples] = []
        self._turn = 0
        self._rest = 0  # inner steps until the next version is watched
        self._in_a_row = 0
        self.undone = 0
        """Versions that were gone after inner steps; 0 until so many were, one after the other, that it is believed."""
        self._of_fragment: dict[int, int] = {}

    @contextmanager
    def under(self, fragment: Fragment) -> Iterator[None]:
        """For a `with`: a version of the fragment is applied inside."""
        if self._watched is not None and self._watched.fragment_id == fragment.fragment_id:
            self._end(self._watched)
        is_due = self._watched is None and self._rest <= 0 and fragment.traits.is_of_model
        places = self._places(fragment) if is_due else []
        if not places:
            yield
            return
        watched = Watched(fragment.fragment_id, places, self._row, self._where)
        watched.look()
        yield
        watched.look()
        self._watched = watched

    def settled(self) -> None:
        """The loop has changed the model since: what is there now is the version."""
        if self._watched is not None and not self._watched.steps:
            self._watched.seen.pop()
            self._watched.look()

    def check(self) -> bool:
        """After every inner step, before versions are applied. Whether it turns out now that steps take versions
        back."""
        before = self.undone
        self._rest -= 1
        if self._watched is not None:
            self._watched.look()
            if self._watched.steps == STEPS:
                self._end(self._watched)
        while self._samples and self._samples[0].are_there():
            sample = self._samples.pop(0)
            self._count(sample.fragment_id, is_gone(sample.values))
        return before < IN_A_ROW <= self.undone

    def _end(self, watched: Watched) -> None:
        """What was seen of a version goes to the CPU."""
        self._watched = None
        if watched.steps < STEPS_LEAST:
            return
        values, are_there = device.on_its_way(torch.stack(watched.seen).flatten(2).float())
        self._samples.append(Samples(watched.fragment_id, values, are_there))

    def _count(self, fragment_id: int, is_gone: bool) -> None:
        self._in_a_row = self._in_a_row + 1 if is_gone else 0
        self._rest = 0 if is_gone else REST
        of_fragment = self._of_fragment[fragment_id] = self._of_fragment.get(fragment_id, 0) + 1 if is_gone else 0
        in_a_row = max(self._in_a_row, of_fragment)
        if in_a_row == IN_A_ROW > self.undone:
            self.undone = IN_A_ROW
        elif is_gone and self.undone:
            self.undone += 1

    def _places(self, fragment: Fragment) -> list[RowPlace]:
        """In some of the tensors of the fragment, in turn."""
        found = [RowPlace(p.tensor, p.tensor_offset, p.tensor_offset + p.num_elements) for p in fragment.pieces]
        found = [place for place in found if self._memory(place).numel() >= ROW]
        if not found:
            return []
        self._turn += 1
        first = self._turn * ROWS % len(found)
        return (found[first:] + found[:first])[:ROWS]

    def _memory(self, place: RowPlace) -> Tensor:
        """The elements of a place, or most of them, in the order in which they lie in memory. Empty: they lie apart."""
        theta = self._theta(place.tensor)
        if theta.is_contiguous():
            return theta.view(-1)[place.start : place.stop]
        part = max((part for _, part in layout.parts(theta, place.start, place.stop)), key=torch.numel)
        flat = layout.in_memory_order(part)
        return part.new_empty(0) if flat is None else flat

    def _row(self, place: RowPlace) -> Tensor:
        """[RUNS, RUN]"""
        memory = self._memory(place)
        return memory.as_strided((RUNS, RUN), (memory.numel() // RUNS, 1))


def is_gone(samples: Tensor) -> bool:
    """Whether a version was undone, by what is seen of it: float32 [steps + 2, rows, ROW]."""
    laid = samples[1] - samples[0]
    steps = samples[1:-1] - samples[2:]
    back, laid_2 = (steps * laid).sum(2), laid.square().sum(1)
    sizes = steps.square().sum(2).sqrt()
    told = gone = 0
    for row in range(samples.shape[1]):
        if int(laid[row].count_nonzero()) >= CHANGED_LEAST and float(laid_2[row]) > 0:
            told += 1
            gone += _is_undone_by_one(back[:, row].tolist(), sizes[:, row].tolist(), float(laid_2[row]))
    return gone * 2 > told


def _is_undone_by_one(back: list[float], sizes: list[float], laid_2: float) -> bool:
    """`back`: -<s, d> of each step; `sizes`: |s|; `laid_2`: <d, d>."""
    at = max(range(len(back)), key=back.__getitem__)
    share, size = back[at] / laid_2, sizes[at]
    return (
        SHARE_LEAST <= share <= SHARE_MOST
        and back[at] >= LIKENESS_LEAST * size * laid_2**0.5
        and size >= OUTSTANDING * median(sizes[:at] + sizes[at + 1 :])
    )
