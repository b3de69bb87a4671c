"""The shared parameters of one model as flat fragments: copies values between them and flat float32 tensors.

Works for every layout of a parameter (layout.py). The storage is looked up each time, since it may be replaced
(`parameter.data = tensor`, as SAM does).

`Replica` uses one such class for each kind of tensor in this process: momentum.py and buffers.py describe what differs
there, and copies.py what differs if the optimizer steps on copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from diloco_common.codec.base import as_held, progress_since, rounds
from diloco_common.errors import ModelChanged
from diloco_common.wire.manifest import Fragment, Piece
from diloco_worker.core import layout
from diloco_worker.core.device import used_here


class Parameters:
    """Parameters by plain name. Values are [num_elements] of a fragment, on the model's device."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        """The tensors that hold this process's values."""
        self._forms = {name: form_of(tensor) for name, tensor in tensors.items()}

    def theta(self, name: str) -> Tensor:
        """The current tensor. Raises ModelChanged."""
        theta = self.tensors[name].detach()
        if form_of(theta) != self._forms[name]:
            raise changed_form(name, theta, *self._forms[name])
        return theta

    def copies(self) -> list[tuple[str, Tensor]]:
        """Tensors that move with a parameter, each with its name."""
        return []

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """out <- theta, in float32."""
        _clear_gaps(fragment, out)
        for piece, theta in self.views(fragment):
            _like(theta, out[piece.bounds]).copy_(theta)

    def progress(self, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
        """out <- anchor - theta, in the dtype of `out`. The anchor is rounded as theta is: rounding was not trained."""
        used_here(anchor)
        _clear_gaps(fragment, out)
        flat: list[tuple[int, Tensor]] = []
        for piece, theta in self.views(fragment):
            if theta.dim() == 1 and theta.is_contiguous():
                flat.append((piece.offset, theta))
            else:
                into, since = out[piece.bounds], anchor[piece.bounds]
                torch.sub(_like(theta, as_held(since, theta.dtype)), theta, out=_like(theta, into))
        progress_since(anchor, flat, out)

    def rounds(self, fragment: Fragment, values: torch.dtype) -> bool:
        """Whether some of these cannot hold all values of this dtype. May be called in any thread."""
        return any(rounds(self._forms[piece.tensor][1], values) for piece in fragment.pieces)

    def as_held(self, fragment: Fragment, values: Tensor) -> Tensor:
        """A float32 copy of these values, rounded as the model holds them."""
        held = values.to(torch.float32, copy=True)
        for piece in fragment.pieces:
            held[piece.bounds] = as_held(values[piece.bounds], self._forms[piece.tensor][1])
        return held

    def write(self, fragment: Fragment, values: Tensor, *, trains_on: bool = False) -> None:
        """theta <- values, rounded to the dtype of each tensor. Training owns none: `trains_on` changes nothing."""
        used_here(values)
        with self._bounded(fragment):
            for piece, theta in self.views(fragment):
                theta.copy_(_like(theta, values[piece.bounds]))

    def add(self, fragment: Fragment, difference: Tensor, steps: int = 0) -> None:
        """theta <- theta + difference, computed in float32. `steps`: inner steps by which it is late."""
        used_here(difference)
        with self._bounded(fragment):
            for piece, theta in self.views(fragment):
                theta.add_(_like(theta, difference[piece.bounds]), alpha=self._kept(piece, steps))

    def left(self, fragment: Fragment, difference: Tensor, steps: int) -> Tensor:
        """The part of a difference that `add` applies after `steps` inner steps, float32."""
        return difference

    def views(self, fragment: Fragment) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece of a fragment with its part of the model: a flat view, or several views if not contiguous."""
        for piece in fragment.pieces:
            theta = self.theta(piece.tensor)
            if theta.is_contiguous():
                yield piece, theta.view(-1)[piece.tensor_bounds]
                continue
            begins = piece.offset - piece.tensor_offset
            for first, part in layout.parts(theta, piece.tensor_offset, piece.tensor_offset + piece.num_elements):
                yield Piece(piece.tensor, first, part.numel(), begins + first, piece.rule), part

    def _kept(self, piece: Piece, steps: int) -> float:
        return 1.0

    def _bounded(self, fragment: Fragment) -> AbstractContextManager[None]:
        """Inside this `with`, values from other learners are added or written."""
        return nullcontext()


def form_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def changed_form(
    name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> ModelChanged:
    return ModelChanged(
        f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and when the model joined it was {dtype} "
        f"{tuple(shape)} on {device}: move and convert the model before `join`. This learner ends"
    )


def _clear_gaps(fragment: Fragment, out: Tensor) -> None:
    """Zero the gaps between the pieces that a rank holds."""
    if sum(piece.num_elements for piece in fragment.pieces) < out.numel():
        out.zero_()


def _like(theta: Tensor, values: Tensor) -> Tensor:
    return values if theta.dim() == 1 else values.view(theta.shape)
