"""Companions: the momentum of the user's inner optimizers, which learners average as they average the model.

Muon and SGD keep it as `momentum_buffer`, Adam and AdamW as `exp_avg`. Optimizers create it at their first step, so it
is created here before that, exactly as the optimizer would: zeros, at step 0. From then on both the optimizer and,
between two steps, the learner change it in place. `check` notices if other tensors replace it, as `load_state_dict`
does.

Adam and AdamW divide it by the root of their second moment, which stays local. If the gradients are one's own, then

    |exp_avg| <= (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)) sqrt(exp_avg_sq)

always holds (Cauchy-Schwarz over their history). Momentum from others may exceed it, so it is cut to this bound
(`Replica`). Otherwise an embedding row that only others have seen would be divided by eps, and a fresh optimizer, whose
bias correction takes the momentum for its own first gradient, would begin with steps that are too long.

Schedules such as OneCycleLR change betas. So they are read when a version is applied, as if they had never changed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco_common.errors import ConfigError, ModelChanged, UnsupportedModel
from diloco_common.wire.manifest import Momentum
from diloco_worker.core.momentum import Companion, MomentumUse
from diloco_worker.core.shared_set import SharedSet

ADAM = torch.optim.Adam, torch.optim.AdamW
MUON = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()
KEPT: dict[Momentum, tuple[str, ...]] = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "Muon": ("momentum_buffer",),
    "SGD": ("momentum_buffer",),
}
"""Kind of momentum -> its key in the optimizer's state, and that of the second moment, if any."""


class _Held(NamedTuple):
    """A tensor in an optimizer's state, and its place there."""

    of: str
    optimizer: Optimizer
    parameter: Tensor
    key: str
    tensor: Tensor


class Companions:
    """The momentum of some optimizers, as it was when the model joined. Owned by the training thread."""

    def __init__(self, optimizers: Optimizer | Iterable[Optimizer], chosen: SharedSet) -> None:
        """Create momentum that the optimizers have not created yet. Parameters of no optimizer have no companion.
        Raises ConfigError if these are not optimizers of this model, and UnsupportedModel for an unknown kind."""
        every = _listed(optimizers)
        name_of = {id(p): name for name, p in chosen.shared.items()}
        self.by_name: dict[str, Companion] = {}
        self._held: list[_Held] = []
        for optimizer in every:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in name_of:
                        self._add(name_of[id(parameter)], optimizer, group, parameter)
        self._states = [(optimizer, optimizer.state, list(optimizer.state.values())) for optimizer in every]
        self._owners = [held.optimizer.state[held.parameter] for held in self._held]
        self._keys = [held.key for held in self._held]
        self._tensors = [held.tensor for held in self._held]
        if not self.by_name:
            raise ConfigError(
                "no optimizer in companions= steps the model's trainable parameters: "
                "give the one that trains this model"
            )

    def check(self) -> None:
        """Check that the optimizers still hold these very tensors, whatever their values. Raises ModelChanged."""
        if self._is_as_it_was():
            return
        for held in self._held:
            if held.optimizer.state.get(held.parameter, {}).get(held.key) is not held.tensor:
                raise ModelChanged(
                    f"the {held.key} of {held.of} was replaced by another tensor since the model joined, as by "
                    "optimizer.load_state_dict(...). Load the optimizer's state before `join`; from then on leave it "
                    "to optimizer and learner. This learner ends"
                )

    def _is_as_it_was(self) -> bool:
        """A quick check in C, since it runs at every step. `check` examines what fails it."""
        for optimizer, state, values in self._states:
            if optimizer.state is not state or len(state) < len(values):
                return False
            if not all(map(operator.is_, state.values(), values)):
                return False
        return all(map(operator.is_, map(dict.get, self._owners, self._keys), self._tensors))

    def _add(self, of: str, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
        state = optimizer.state[parameter]
        kind = _kind(optimizer, group)
        keys = KEPT[kind]
        if keys[0] not in state:
            state.update(_first_state(group, parameter, keys))
        first, *second = (state[key] for key in keys)
        pace = partial(_pace, group)
        pace()  # may raise
        self.by_name[of] = Companion(kind, first, second[0] if second else None, pace)
        self._held += [_Held(of, optimizer, parameter, key, state[key]) for key in keys]


def most_of(beta1: float, beta2: float) -> float:
    """The largest |exp_avg| / sqrt(exp_avg_sq) that gradients can produce. Raises UnsupportedModel."""
    if beta1**2 >= beta2:
        raise UnsupportedModel(
            f"companions=: with betas ({beta1:g}, {beta2:g}) the step of an optimizer has no bound, so the momentum of "
            "others could make it any length; take a beta2 above the square of beta1"
        )
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def _listed(optimizers: object) -> list[Optimizer]:
    every: list[Any] = [optimizers]
    if isinstance(optimizers, Iterable) and not isinstance(optimizers, nn.Module | Mapping):
        every = list(optimizers)
    for one in every:
        if isinstance(one, Mapping) and "param_groups" in one:
            raise ConfigError(
                "companions= has a state_dict of an optimizer: give the optimizer itself, with that state loaded. Its "
                "momentum is averaged in place"
            )
        if not isinstance(one, Optimizer):
            raise ConfigError(
                f"companions= has a {type(one).__name__}: give the optimizer of this model, or a list of them, as they "
                "are made from torch.optim"
            )
    return every


def _pace(group: dict[str, Any]) -> MomentumUse:
    """How the group currently treats its momentum. Raises UnsupportedModel."""
    if "betas" not in group:
        return MomentumUse(float(group["momentum"]))
    beta1, beta2 = map(float, group["betas"])
    return MomentumUse(beta1, most_of(beta1, beta2))


def _kind(optimizer: Optimizer, group: dict[str, Any]) -> Momentum:
    """The kind of a group's momentum. With nesterov, Muon and SGD step differently, but keep the same momentum.

    A user's own optimizer can tell it by a method `kind_of_momentum(group)`. Raises UnsupportedModel for an unknown
    optimizer.
    """
    if says := getattr(optimizer, "kind_of_momentum", None):
        kind: Momentum = says(group)
        return kind
    if isinstance(optimizer, ADAM):
        return "Adam"
    if isinstance(optimizer, MUON):
        return "Muon"
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
        return "SGD"
    if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
        raise UnsupportedModel(
            "companions=: an SGD with momentum=0 keeps no momentum, so there is nothing to average: give it one, or "
            "leave it out of companions="
        )
    raise UnsupportedModel(
        f"companions=: how a {type(optimizer).__module__}.{type(optimizer).__name__} keeps its momentum is unknown. "
        "Known are torch's Adam, AdamW, Muon, and SGD with momentum and without dampening: take one of them, or leave "
        "the momentum local"
    )


def _first_state(group: dict[str, Any], parameter: Tensor, keys: tuple[str, ...]) -> dict[str, Tensor]:
    """The state that the optimizer would create at its first step."""
    state = {key: torch.zeros_like(parameter) for key in keys}
    if len(keys) > 1:
        is_on_device = group["fused"] or group["capturable"]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if is_on_device else "cpu")
    if group.get("amsgrad"):
        state["max_exp_avg_sq"] = torch.zeros_like(parameter)
    return state
