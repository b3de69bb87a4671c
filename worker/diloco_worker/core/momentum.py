"""Companions: the momentum of the user's inner optimizers, which learners average as they average the model.

Muon and SGD keep it as `momentum_buffer`, Adam and AdamW as `exp_avg`. Optimizers create it at their first step, so it
is created here before that, exactly as the optimizer would: zeros, at step 0. From then on both the optimizer and,
between two steps, the learner change it in place. `check` notices if other tensors replace it, as `load_state_dict`
does. An inner step forgets part of the momentum, so a version that arrives late is scaled by what would be left of it.

Adam and AdamW divide it by the root of their second moment, which stays local. If all gradients are local, then

    |exp_avg| <= (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)) sqrt(exp_avg_sq)

always holds (Cauchy-Schwarz over their history). Momentum from others may exceed it, so it is cut to this bound.
Otherwise an embedding row that only others have seen would be divided by eps, and a fresh optimizer, whose bias
correction takes the momentum for its own first gradient, would begin with steps that are too long.

Schedules such as OneCycleLR change betas. So betas are read when a version is applied, as if they had never changed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco_common.errors import ConfigError, ModelChanged, UnsupportedModel
from diloco_common.wire.manifest import Fragment, Momentum, Piece, TensorSpec, companion_of, momentum_of
from diloco_worker.core import layout
from diloco_worker.core.parameters import Parameters
from diloco_worker.core.shared_set import SharedSet

MOST_OF_OWN = 3.0
"""Largest growth of the norm by one version, for momentum that no second moment divides. Their mean is no longer than
the longest, and 24 inner steps keep 0.29 of it at mu = 0.95, so the effect of liars does not grow over versions."""


class MomentumUse(NamedTuple):
    keeps: float = 1.0
    """Share of the values that an inner step keeps: beta1 of AdamW, mu of Muon."""
    most: float = math.inf
    """Bound on the values, as a multiple of the root of the second moment, if they came from local gradients alone."""


class Companion(NamedTuple):
    """Optimizer state of one parameter that changes in place. Tensors are float32, of the parameter's shape."""

    kind: Momentum
    values: Tensor
    second: Tensor | None = None
    """The second moment by whose root the optimizer divides; it stays local. None: it divides by none."""
    pace: Callable[[], MomentumUse] = MomentumUse
    """Called when a version is applied, since schedules change betas."""


class Momenta(Parameters):
    """The companions of one model, by the names that learners declare."""

    def __init__(self, companions: Mapping[str, Companion]) -> None:
        super().__init__({name: companion.values for name, companion in companions.items()})
        self._companions = dict(companions)

    def left(self, fragment: Fragment, difference: Tensor, steps: int) -> Tensor:
        left = torch.empty_like(difference)
        for piece in fragment.pieces:
            torch.mul(difference[piece.bounds], self._kept(piece, steps), out=left[piece.bounds])
        return left

    def _kept(self, piece: Piece, steps: int) -> float:
        return self._companions[piece.tensor].pace().keeps ** steps

    @contextmanager
    def _bounded(self, fragment: Fragment) -> Iterator[None]:
        """Inside, values from other learners are added or written; afterwards they are limited.

        Where this learner has seen no gradient yet (a row of an embedding) the second moment is zero, and the optimizer
        would divide the momentum of others by its eps. Without a second moment, a single liar could make the momentum
        so long that it is forgotten only after hundreds of steps, so it is scaled. Momentum of zero takes any value.
        """
        found = [(self._companions[piece.tensor], piece, values) for piece, values in self.views(fragment)]
        own = [torch.linalg.vector_norm(values) if c.second is None else None for c, _, values in found]
        yield
        for (companion, piece, values), norm in zip(found, own, strict=True):
            if companion.second is not None:
                start = piece.tensor_offset
                ((_, second),) = layout.parts(companion.second, start, start + piece.num_elements)
                most = second.sqrt().mul_(companion.pace().most)
                torch.clamp(values, -most, most, out=values)
            elif norm is not None:
                share = (MOST_OF_OWN * norm / torch.linalg.vector_norm(values)).clamp_(max=1.0)
                values.mul_(torch.where(norm > 0, share, 1.0)).nan_to_num_(0.0, 0.0, 0.0)


def declared(
    companions: Mapping[str, Companion], parameters: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]
) -> tuple[Momenta, list[TensorSpec]]:
    """The companions of some parameters and their declarations, in parameter order. Raises UnsupportedModel."""
    for name, companion in companions.items():
        _check(name, companion, parameters)
    held = Momenta({momentum_of(name, of.kind): of for name, of in companions.items()})
    return held, [companion_of(spec, companions[name].kind) for name, spec in specs.items() if name in companions]


def _check(name: str, companion: Companion, parameters: Mapping[str, Tensor]) -> None:
    what, values = momentum_of(name, companion.kind), companion.values
    if what in parameters:
        raise UnsupportedModel(f"the model has a parameter that is called {what!r}, as its averaged momentum would be")
    if values.dtype != torch.float32:
        raise UnsupportedModel(
            f"the {what} is {values.dtype}; only float32 is averaged: keep the parameter in float32, or leave the "
            "momentum local (without companions=)"
        )
    second = values if companion.second is None else companion.second
    if values.shape != parameters[name].shape or layout.overlaps_itself(values) or second.stride() != values.stride():
        raise UnsupportedModel(f"the {what} is laid out differently from {name}, so it cannot be averaged")


ADAM = torch.optim.Adam, torch.optim.AdamW
MUON = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()
KEPT: dict[Momentum, tuple[str, ...]] = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "Muon": ("momentum_buffer",),
    "SGD": ("momentum_buffer",),
}
"""Kind of momentum -> its key in the optimizer's state, and that of the second moment, if any."""


class _StateTensor(NamedTuple):
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
        self._held: list[_StateTensor] = []
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
        """A quick check in C, since it runs at every step. If it fails, `check` looks closer."""
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
        self._held += [_StateTensor(of, optimizer, parameter, key, state[key]) for key in keys]


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
                f"companions= has a {type(one).__name__}: give the optimizer of this model, or a list of them, as "
                "torch.optim makes them"
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

    A user's own optimizer can report it by a method `kind_of_momentum(group)`. Raises UnsupportedModel for an unknown
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
