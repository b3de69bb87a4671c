"""Finds the copies of weights that the user's optimizers step on.

They are looked up for each version that is applied: most optimizers create their copies at their first step, and
`load_state_dict` replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from diloco_common.errors import WrongCall, did_you_mean, shown
from diloco_worker.core.copies import FindCopies
from diloco_worker.core.shared_set import SharedSet

Masters: TypeAlias = Any
"""As `join` accepts it: one or several optimizers; names with their copies; pairs of a parameter and its copy; or a
function that returns the copies of a name. Several copies of one parameter are given as a list."""

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
    """By a key that the published ones have. Their y follows z by 1/t, too slowly for undone.py to notice."""
    return any("train_mode" in group for group in optimizer.param_groups)


def _finder(masters: Masters, chosen: SharedSet) -> Callable[[str], Any]:
    if isinstance(masters, Mapping) and all(isinstance(name, str) for name in masters):
        return _by_name(masters, chosen).get
    if _is_optimizer(masters):
        return _of_optimizers([masters], chosen)
    if isinstance(masters, list | tuple) and masters and all(map(_is_optimizer, masters)):
        return _of_optimizers(masters, chosen)
    if isinstance(masters, list | tuple) and masters and all(map(_is_pair, masters)):
        return _by_name(_names_of(masters, chosen), chosen).get
    if callable(masters) and not isinstance(masters, nn.Module | type):
        return _by_any_name(masters, chosen)
    raise WrongCall(
        f"masters= is {shown(masters)}: give the optimizer that keeps copies of the weights, a dict of names and "
        "tensors, a list of pairs (parameter, tensor), or a function of a name"
    )


def _is_optimizer(one: object) -> bool:
    """Includes wrappers that are not torch optimizers."""
    return hasattr(one, "param_groups") and hasattr(one, "state")


def _is_pair(one: object) -> bool:
    return isinstance(one, list | tuple) and len(one) == 2 and isinstance(one[0], Tensor)


def _by_name(given: Mapping[str, Any], chosen: SharedSet) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, copies in given.items():
        of = chosen.name_of.get(name)
        if of is None:
            raise WrongCall(f"masters=: the model has no parameter {name}{did_you_mean(name, chosen.name_of)}")
        if of in chosen.shared:
            found[of] = copies
    return found


def _by_any_name(ask: Callable[[str], Any], chosen: SharedSet) -> Callable[[str], Any]:
    names_of: dict[str, list[str]] = {}
    for name, of in chosen.name_of.items():
        names_of.setdefault(of, []).append(name)
    return lambda of: next((copies for name in names_of[of] if (copies := ask(name)) is not None), None)


def _names_of(pairs: Sequence[Any], chosen: SharedSet) -> dict[str, list[Any]]:
    by_id = {id(parameter): name for name, objects in chosen.objects.items() for parameter in objects}
    found: dict[str, list[Any]] = {}
    for number, (parameter, copy) in enumerate(pairs):
        if id(parameter) not in by_id:
            raise WrongCall(f"masters=: the first of pair {number} is no parameter of the model")
        found.setdefault(by_id[id(parameter)], []).append(copy)
    return found


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
    """Raises WrongCall if this optimizer's state has copies of no parameter under a known name."""
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
