"""Applies versions to the copies of the weights that some optimizers step on.

A float32 master is rounded and written over its parameter after each step. Schedule-free optimizers keep `z`, and
Lookahead keeps slow weights. A version must move the parameter and all of its copies, or the optimizer undoes it
(undone.py).

If a parameter equals its rounded float32 copy, its values are read from the copy. So small progress that bfloat16
cannot hold still counts as trained, and no contribution pushes rounding as a gradient. This is decided per element and
needs no knowledge of the optimizer: for other kinds of copies the error is less than the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from diloco_common.codec.base import as_held
from diloco_common.wire.manifest import Fragment, Piece
from diloco_worker.core import layout
from diloco_worker.core.device import used_here
from diloco_worker.core.parameters import Parameters

FindCopies = Callable[[str], Sequence[Tensor]]
"""Name of a shared parameter -> its current copies, of the same shape and device."""


class Copied(Parameters):
    def __init__(self, tensors: Mapping[str, Tensor], find: FindCopies) -> None:
        super().__init__(tensors)
        self._find = find

    def copies(self) -> list[tuple[str, Tensor]]:
        return [(name, copy) for name in self.tensors for copy in self._find(name)]

    def read(self, fragment: Fragment, out: Tensor) -> None:
        for piece, theta, copies in self._pieces(fragment):
            out[piece.bounds].copy_(_finest(piece, theta, copies))

    def progress(self, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
        """out <- anchor - theta; the anchor is rounded to theta's dtype where no copy is more exact."""
        used_here(anchor)
        for piece, theta, copies in self._pieces(fragment):
            since = anchor[piece.bounds]
            held, master = as_held(since, theta.dtype), _master(copies)
            if master is not None and held is not since:
                held = torch.where(_flat(piece, master).to(theta.dtype) == _flat(piece, theta), since.float(), held)
            torch.sub(held, _finest(piece, theta, copies), out=out[piece.bounds])

    def as_held(self, fragment: Fragment, values: Tensor) -> Tensor:
        """Unrounded where there is a float32 copy."""
        held = super().as_held(fragment, values)
        for piece in fragment.pieces:
            if _master(self._find(piece.tensor)) is not None:
                held[piece.bounds] = values[piece.bounds]
        return held

    def add(self, fragment: Fragment, difference: Tensor, steps: int = 0) -> None:
        """Also added to all copies; each is rounded once."""
        used_here(difference)
        for piece, theta, copies in self._pieces(fragment):
            moved = difference[piece.bounds]
            _put(piece, theta, _finest(piece, theta, copies).float() + moved)
            for copy in copies:
                _put(piece, copy, _flat(piece, copy).float() + moved)

    def write(self, fragment: Fragment, values: Tensor, *, trains_on: bool = False) -> None:
        used_here(values)
        for piece, theta, copies in self._pieces(fragment):
            for tensor in (theta, *copies):
                _put(piece, tensor, values[piece.bounds])

    def _pieces(self, fragment: Fragment) -> Iterator[tuple[Piece, Tensor, Sequence[Tensor]]]:
        for piece in fragment.pieces:
            yield piece, self.theta(piece.tensor), self._find(piece.tensor)


def _finest(piece: Piece, theta: Tensor, copies: Sequence[Tensor]) -> Tensor:
    """theta, flat, in the best precision available."""
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
