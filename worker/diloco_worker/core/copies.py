"""Finds the copies of the weights that some optimizers step on, and applies versions to them.

A float32 master is rounded and written over its parameter after each step. Schedule-free optimizers keep `z`, and
Lookahead keeps slow weights. A version must move the parameter and all of its copies, or the optimizer undoes it
(undone.py).

If a parameter equals its rounded float32 copy, its values are read from the copy. So small progress that bfloat16
cannot hold still counts as trained, and no contribution pushes rounding as a gradient. This is decided per element and
needs no knowledge of the optimizer: for other kinds of copies the error is less than the rounding.

Copies are looked up for each version that is applied: most optimizers create them at their first step, and
`load_state_dict` replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from diloco_common.codec.base import as_held
from diloco_common.errors import WrongCall, shown
from diloco_common.wire.manifest import Fragment, Piece
from diloco_worker.core import layout
from diloco_worker.core.device import used_here
from diloco_worker.core.parameters import Parameters
from diloco_worker.core.shared_set import SharedSet

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


Masters: TypeAlias = Any
"""As `join` accepts it: one or several optimizers, or a function that returns the copies of a name, one or a list."""

KEYS = (
    "z", "x", "y",  # schedule-free
    "slow_param", "slow_params", "slow_buffer", "lookahead_slow_buff", "cached_params",  # Lookahead, Ranger
    "master_param", "master_params", "master", "master_weight", "fp32_param",  # float32 beside 16 bits
    "x0",  # MADGRAD with momentum, and other dual averaging
)  # fmt: skip
"""Names of copies of the weights in the state of known optimizers."""


def find_copies(masters: Masters, chosen: SharedSet) -> FindCopies:
    """A function that finds the copies of a shared parameter. Both it and this call raise WrongCall."""
    found = _finder(masters, chosen)

    def find(name: str) -> Sequence[Tensor]:
        given = found(name)
        copies = [] if given is None else [given] if isinstance(given, Tensor) else list(given)
        for copy in copies:
            _check(name, chosen.shared[name], copy)
        return [copy.detach() for copy in copies]

    for name in chosen.shared:
        find(name)
    return find


def is_schedule_free(optimizer: Any) -> bool:
    """Whether it has the key of schedule-free ones. Their y follows z by 1/t, too slowly for undone.py to notice."""
    return any("train_mode" in group for group in optimizer.param_groups)


def _finder(masters: Masters, chosen: SharedSet) -> Callable[[str], Any]:
    optimizers = masters if isinstance(masters, list | tuple) else [masters]
    if optimizers and all(map(_is_optimizer, optimizers)):
        return _of_optimizers(optimizers, chosen)
    if callable(masters) and not isinstance(masters, nn.Module | type):
        return _by_any_name(masters, chosen)
    raise WrongCall(
        f"masters= is {shown(masters)}: give the optimizer that keeps copies of the weights, or a function of a name "
        "that returns them, such as copies.get of a dict"
    )


def _is_optimizer(one: object) -> bool:
    """Includes wrappers that are not torch optimizers."""
    return hasattr(one, "param_groups") and hasattr(one, "state")


def _by_any_name(ask: Callable[[str], Any], chosen: SharedSet) -> Callable[[str], Any]:
    names_of: dict[str, list[str]] = {}
    for name, of in chosen.name_of.items():
        names_of.setdefault(of, []).append(name)
    return lambda of: next((copies for name in names_of[of] if (copies := ask(name)) is not None), None)


def _of_optimizers(optimizers: Sequence[Any], chosen: SharedSet) -> Callable[[str], list[Tensor]]:
    def find(name: str) -> list[Tensor]:
        copies: list[Tensor] = []
        for optimizer in optimizers:
            for parameter in chosen.objects[name]:
                copies += _of_state(optimizer.state.get(parameter, {}))
                copies += _of_groups(optimizer, parameter)
            if any(optimizer.state.values()) and not copies:  # schedule-free's train() creates empty states
                _check_known(optimizer)
        return list({id(copy): copy for copy in copies}.values())

    return find


def _of_state(state: object) -> list[Tensor]:
    return [state[key] for key in KEYS if isinstance(state.get(key), Tensor)] if isinstance(state, Mapping) else []


def _of_groups(optimizer: Any, parameter: Tensor) -> list[Tensor]:
    """Copies as apex and others keep them: groups of masters beside the groups of parameters."""
    return [
        master
        for group, masters in zip(
            optimizer.param_groups, getattr(optimizer, "param_groups_master", None) or (), strict=False
        )
        for one, master in zip(group["params"], masters["params"], strict=True)
        if one is parameter and isinstance(master, Tensor)
    ]


def _check_known(optimizer: Any) -> None:
    """Raises WrongCall if this optimizer's state has no copy of any parameter under a known name."""
    if getattr(optimizer, "param_groups_master", None) or any(map(_of_state, optimizer.state.values())):
        return
    keys = sorted({str(key) for state in optimizer.state.values() if isinstance(state, Mapping) for key in state})
    raise WrongCall(
        f"masters=: in the state of {type(optimizer).__name__}, {', '.join(keys) or 'empty'}, nothing is known "
        "as a copy of the weights: leave masters= out if it has none, else give a function of a name that returns them"
    )


def _check(name: str, parameter: Tensor, copy: object) -> None:
    if not isinstance(copy, Tensor) or not copy.is_floating_point():
        raise WrongCall(f"masters=: the copy of {name} is {shown(copy)}, and no tensor of floats")
    if copy.shape != parameter.shape or copy.device != parameter.device or copy.layout is not torch.strided:
        raise WrongCall(
            f"masters=: the copy of {name} is {tuple(copy.shape)} on {copy.device}, and the parameter "
            f"{tuple(parameter.shape)} on {parameter.device}: give a view of that shape, there"
        )
    if copy.numel() and copy.data_ptr() == parameter.data_ptr():
        raise WrongCall(f"masters=: what is given for {name} is the parameter itself, not a copy of it")
