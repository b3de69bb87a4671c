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
How the constants were measured: decision 128 (docs/decisions.md).

Nothing waits for a device: the rows are read when they are on the CPU, a step or more later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from diloco_common.errors import VersionUndone
from diloco_common.manifest import Fragment
from diloco_worker.core import layout

ROWS = 4
"""Tensors of a fragment that are watched at once; with another version, others of them."""
ROW = 64
"""Elements of each. Smaller tensors are not watched."""
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


class Place(NamedTuple):
    """A row: every `stride`-th element in memory of a part of a tensor."""

    tensor: str
    start: int
    stop: int
    stride: int


class Watched:
    """The version that is watched at the moment."""

    def __init__(self, fragment_id: int, places: list[Place], before: Tensor) -> None:
        self.fragment_id = fragment_id
        self.places = places
        self.rows = [before]
        """Before the version, with it, and after each inner step."""

    @property
    def steps(self) -> int:
        return len(self.rows) - 2


class Samples(NamedTuple):
    """Of a version that is watched no longer: float32 [steps + 2, rows, ROW] on the CPU, once it is there."""

    fragment_id: int
    values: Tensor
    event: torch.cuda.Event | None

    def are_there(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


class Laid:
    """Whether what was laid under the parameters of one model stays there. Owned by the training thread."""

    def __init__(self, theta: Callable[[str], Tensor]) -> None:
        """`theta`: a tensor of the model, as it is now."""
        self._theta = theta
        self._watched: Watched | None = None
        self._samples: list[Samples] = []
        self._turn = 0
        self._in_a_row = 0
        self._of_fragment: dict[int, int] = {}

    @contextmanager
    def under(self, fragment: Fragment) -> Iterator[None]:
        """For a `with`: a version of the fragment is applied inside."""
        if self._watched is not None and self._watched.fragment_id == fragment.fragment_id:
            self._end(self._watched)
        if self._watched is not None or fragment.companion:
            yield
            return
        places = self._places(fragment)
        before = self._read(places)
        yield
        if before is not None and (after := self._read(places)) is not None:
            self._watched = Watched(fragment.fragment_id, places, before)
            self._watched.rows.append(after)

    @torch.no_grad()
    def check(self) -> None:
        """After every inner step, before versions are applied. Raises VersionUndone."""
        watched = self._watched
        if watched is not None and (now := self._read(watched.places)) is not None:
            watched.rows.append(now)
            if watched.steps == STEPS:
                self._end(watched)
        while self._samples and self._samples[0].are_there():
            sample = self._samples.pop(0)
            self._count(sample.fragment_id, is_gone(sample.values))

    def _end(self, watched: Watched) -> None:
        """What was seen of a version goes to the CPU."""
        self._watched = None
        if watched.steps < STEPS_LEAST:
            return
        values, event = torch.stack(watched.rows), None
        if values.is_cuda:
            there = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
            values, event = there, torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._samples.append(Samples(watched.fragment_id, values, event))

    def _count(self, fragment_id: int, is_gone: bool) -> None:
        self._in_a_row = self._in_a_row + 1 if is_gone else 0
        of_fragment = self._of_fragment[fragment_id] = self._of_fragment.get(fragment_id, 0) + 1 if is_gone else 0
        if max(self._in_a_row, of_fragment) >= IN_A_ROW:
            raise VersionUndone(
                f"{IN_A_ROW} versions, one after the other, were gone after inner steps: the optimizer steps on a copy "
                "of the weights (float32 masters, Lookahead, schedule-free) and writes it over the parameters. Say at "
                "`join` where the copies are, masters=optimizer or masters={name: tensor}, so that they get versions, "
                "too. This learner ends"
            )

    def _places(self, fragment: Fragment) -> list[Place]:
        """Some of the tensors of the fragment, in turn."""
        found = [piece for piece in fragment.pieces if piece.num_elements >= ROW]
        if not found:
            return []
        self._turn += 1
        first = self._turn * ROWS % len(found)
        chosen = (found[first:] + found[:first])[:ROWS]
        return [
            Place(
                piece.tensor, piece.tensor_offset, piece.tensor_offset + piece.num_elements, piece.num_elements // ROW
            )
            for piece in chosen
        ]

    def _read(self, places: list[Place]) -> Tensor | None:
        """float32 [ROWS, ROW]; None: there is nothing to watch."""
        rows = [row for place in places if (row := self._row(*place)) is not None]
        return torch.stack(rows).float() if rows else None

    def _row(self, name: str, start: int, stop: int, stride: int) -> Tensor | None:
        theta = self._theta(name)
        if theta.is_contiguous():
            return theta.view(-1)[start : start + stride * ROW : stride]
        part = max((part for _, part in layout.parts(theta, start, stop)), key=torch.numel)
        flat = layout.in_memory_order(part)
        if flat is None or flat.numel() < ROW:
            return None
        return flat[: ROW * (flat.numel() // ROW) : flat.numel() // ROW]


def is_gone(samples: Tensor) -> bool:
    """Whether a version was undone, by what is seen of it: float32 [steps + 2, rows, ROW]."""
    laid = samples[1] - samples[0]
    steps = samples[1:-1] - samples[2:]
    back, laid_2 = (steps * laid).sum(2), laid.square().sum(1)
    sizes = steps.square().sum(2).sqrt()
    told = gone = 0
    for row in range(samples.shape[1]):
        if int(laid[row].count_nonzero()) >= CHANGED_LEAST:
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
