"""Detects inner steps that undo the versions applied before them.

Some optimizers step on a copy of the weights (float32 masters, the slow weights of Lookahead) and write it over the
parameters. That undoes every version, and the learner contributes the undoing: the global model ends up worse than
untrained. Such copies must get versions, too (`join(masters=...)`).

Some elements of an applied version are watched over the next inner steps. With d, the change of these elements by the
version, and s, their change by one step, that step has undone the version if

    share = -<s, d> / <d, d>             is within [`SHARE_LEAST`, `SHARE_MOST`]: 1 for masters, 0.5 for Lookahead,
    likeness = -<s, d> / (|s| |d|)       is at least `LIKENESS_LEAST`, and
    |s| / median |s| of the other steps  is at least `OUTSTANDING`: training that oscillates does so evenly.

Each row of elements comes from one tensor, since an optimizer may copy only some. A version counts as undone if most of
the rows that it changed say so, and only `IN_A_ROW` such versions in succession are reported. Even this is a guess: a
loop that keeps its parameters in a set takes back the part of a version that lies outside. So it is logged and counted,
and ends nothing.
The constants were measured: 24 of 24 trials with such an optimizer were found, and none of 30 others. Without the last
condition there were 3 false findings in 50.

Nothing waits for a device: rows are read once they are on the CPU, a step or more later.
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
"""Tensors of a fragment watched at once; other ones for each version."""
RUNS, RUN = 4, 16
ROW = RUNS * RUN
"""Elements per row: a few runs, since each run costs a cache miss per step. Smaller tensors are not watched."""
STEPS = 10
"""Inner steps to watch after a version. Lookahead writes its slow weights every 5, 6 or 10."""
STEPS_LEAST = 3
"""The fewest steps that count, if the next version comes earlier."""
CHANGED_LEAST = 16
"""Elements of a row that a version must change for the row to count; an unused embedding changes none."""
SHARE_LEAST, SHARE_MOST = 0.35, 1.5
LIKENESS_LEAST = 0.7
OUTSTANDING = 2.0
IN_A_ROW = 3
FINDING = "inner steps undo one version after another: this model keeps nothing that others train"
COPIES = "if the optimizer steps on a copy of the weights (float32 masters, Lookahead): join(masters=optimizer)"
CLAMPS = "if the loop clamps or projects the parameters: join(after_version=f)"
REST = 40
"""Inner steps without a watch after a version that stayed: an optimizer that undoes versions undoes all."""

Where = Callable[[str], int]


class RowPlace(NamedTuple):
    """The elements of a tensor from which a row is taken."""

    tensor: str
    start: int
    stop: int


class Watched:
    """The version that is being watched."""

    def __init__(
        self, fragment_id: int, places: list[RowPlace], read: Callable[[RowPlace], Tensor], where: Where
    ) -> None:
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
        """Read the rows: one operation, unless a parameter has new storage, as this runs at every step."""
        addresses = [self._where(place.tensor) for place in self._places]
        if addresses != self._addresses:
            self._addresses, self._views = addresses, [self._read(place) for place in self._places]
        self.seen.append(torch.stack(self._views))


class Samples(NamedTuple):
    """The rows of a version after its watch: float32 [steps + 2, rows, ROW] on the CPU, once they are there."""

    fragment_id: int
    values: Tensor
    are_there: Callable[[], bool]


class Laid:
    """Watches whether versions stay in the parameters of one model. Owned by the training thread."""

    def __init__(self, theta: Callable[[str], Tensor], where: Where) -> None:
        """`theta` returns the current tensor of a name; `where` its address."""
        self._theta, self._where = theta, where
        self._watched: Watched | None = None
        self._samples: list[Samples] = []
        self._turn = 0
        self._rest = 0  # inner steps until the next version is watched
        self._in_a_row = 0
        self.undone = 0
        """Versions that inner steps have undone; 0 until `IN_A_ROW` were in succession."""
        self._of_fragment: dict[int, int] = {}

    @contextmanager
    def under(self, fragment: Fragment) -> Iterator[None]:
        """A `with` block in which a version of the fragment is applied."""
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
        """The loop has changed the model since: its values now count as the version."""
        if self._watched is not None and not self._watched.steps:
            self._watched.seen.pop()
            self._watched.look()

    def check(self) -> bool:
        """Call after every inner step, before versions are applied. True once: steps were found to undo versions."""
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
        """End the watch and send its rows to the CPU."""
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
        found = [RowPlace(p.tensor, p.tensor_offset, p.tensor_offset + p.num_elements) for p in fragment.pieces]
        found = [place for place in found if self._memory(place).numel() >= ROW]
        if not found:
            return []
        self._turn += 1
        first = self._turn * ROWS % len(found)
        return (found[first:] + found[:first])[:ROWS]

    def _memory(self, place: RowPlace) -> Tensor:
        """Most of the elements of a place, as a flat view in memory order. Empty if they have gaps."""
        theta = self._theta(place.tensor)
        if theta.is_contiguous():
            return theta.view(-1)[place.start : place.stop]
        part = max((part for _, part in layout.parts(theta, place.start, place.stop)), key=torch.numel)
        flat = layout.in_memory_order(part)
        return part.new_empty(0) if flat is None else flat

    def _row(self, place: RowPlace) -> Tensor:
        memory = self._memory(place)
        return memory.as_strided((RUNS, RUN), (memory.numel() // RUNS, 1))


def is_gone(samples: Tensor) -> bool:
    """Whether a version was undone, by its rows: float32 [steps + 2, rows, ROW]."""
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
