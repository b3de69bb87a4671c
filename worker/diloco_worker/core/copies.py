"""Some optimizers step on copies of the weights. Versions go into these copies, too.

A float32 master is written over its parameter after each step, rounded. Schedule-free keeps `z`, Lookahead its slow
weights. Whatever moves the parameter moves all of its copies, too: otherwise the optimizer undoes it (undone.py).

Where a parameter is what a float32 copy is after rounding, its values are read from the copy. What bfloat16 could not
hold is then trained progress like any other, and no contribution pushes the rounding as a gradient. That is decided per
element, so nothing has to say which kind of a copy it is: elsewhere it is off by less than the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from diloco_common.codec.base import as_held
from diloco_common.manifest import Fragment, Piece
from diloco_worker.core import layout

FindCopies = Callable[[str], Sequence[Tensor]]
"""Name of a shared parameter -> its copies, as they are now: of its shape, on its device."""


class Copies:
    """The copies of one model's parameters. Values are [num_elements] of a fragment, as the replica's."""

    def __init__(self, find: FindCopies, theta: Callable[[str], Tensor]) -> None:
        self.of = find
        self._theta = theta

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """out <- theta."""
        for piece, theta, copies in self._pieces(fragment):
            out[piece.bounds].copy_(_finest(piece, theta, copies))

    def progress(self, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
        """out <- anchor - theta: where no copy says more of it, the anchor as theta holds it."""
        for piece, theta, copies in self._pieces(fragment):
            since = anchor[piece.bounds]
            held, master = as_held(since, theta.dtype), _master(copies)
            if master is not None and held is not since:
                held = torch.where(_flat(piece, master).to(theta.dtype) == _flat(piece, theta), since.float(), held)
            torch.sub(held, _finest(piece, theta, copies), out=out[piece.bounds])

    def master(self, name: str) -> Tensor | None:
        """The float32 copy of this parameter, if there is one."""
        return _master(self.of(name))

    def add(self, fragment: Fragment, difference: Tensor) -> None:
        """theta <- theta + difference, and all of its copies, each rounded once."""
        for piece, theta, copies in self._pieces(fragment):
            moved = difference[piece.bounds]
            _put(piece, theta, _finest(piece, theta, copies).float() + moved)
            for copy in copies:
                _put(piece, copy, _flat(piece, copy).float() + moved)

    def write(self, fragment: Fragment, values: Tensor) -> None:
        """theta and all of its copies <- values."""
        for piece, theta, copies in self._pieces(fragment):
            for tensor in (theta, *copies):
                _put(piece, tensor, values[piece.bounds])

    def blend(self, fragment: Fragment, values: Tensor, alpha: float) -> None:
        """theta <- alpha * theta + (1 - alpha) * values, and all of its copies."""
        for piece, theta, copies in self._pieces(fragment):
            new = values[piece.bounds].float()
            _put(piece, theta, _finest(piece, theta, copies).float().lerp(new, 1 - alpha))
            for copy in copies:
                _put(piece, copy, _flat(piece, copy).float().lerp(new, 1 - alpha))

    def _pieces(self, fragment: Fragment) -> Iterator[tuple[Piece, Tensor, Sequence[Tensor]]]:
        for piece in fragment.pieces:
            yield piece, self._theta(piece.tensor), self.of(piece.tensor)


def _finest(piece: Piece, theta: Tensor, copies: Sequence[Tensor]) -> Tensor:
    """theta, flat, as exactly as it is known."""
    values = _flat(piece, theta)
    master = _master(copies)
    if theta.dtype == torch.float32 or master is None:
        return values
    exact = _flat(piece, master)
    return torch.where(exact.to(theta.dtype) == values, exact, values.float())


def _master(copies: Sequence[Tensor]) -> Tensor | None:
    return next((copy for copy in copies if copy.dtype == torch.float32), None)


def _flat(piece: Piece, tensor: Tensor) -> Tensor:
    return layout.flat(tensor, piece.tensor_offset, piece.tensor_offset + piece.num_elements)


def _put(piece: Piece, tensor: Tensor, values: Tensor) -> None:
    layout.put(tensor, piece.tensor_offset, piece.tensor_offset + piece.num_elements, values)
