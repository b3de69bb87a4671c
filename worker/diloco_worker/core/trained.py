"""What optimizers train, beside what is shared: both differences by name, and the line that mends each.

A target network that requires gradients is in the model and in no optimizer: merged like all others, it is worth
nothing. A head that lives in the loss is in the optimizer and not in the model: every learner has its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diloco_common.wire.messages import ADAM, OTHER
from diloco_worker.core.shared_set import SharedSet

SHOWN = 3
KIN = ("adam", "lamb", "adafactor", "soap", "adan")
"""In the names of optimizers that divide by a running mean of squared gradients, as Adam does, whoever made them:
AdamW8bit, FusedAdam, AdamWScheduleFree."""
NO_KIN = ("muon",)
"""MuonWithAuxAdam steps the matrices, nearly all of a model, otherwise."""
INSIDE = ("optimizer", "_optimizer", "optim", "base_optimizer")
"""Where wrappers keep the optimizer that steps: of accelerate, Lightning, and others."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Between a model and its optimizers. False if there are none."""

    untrained: tuple[str, ...] = ()
    """Shared parameters that require a gradient, and that no optimizer has."""
    patterns: tuple[str, ...] = ()
    """The fewest that fit these, and none of the others."""
    unshared: tuple[tuple[int, ...], ...] = ()
    """Shapes of what an optimizer has and the model has not."""

    def __bool__(self) -> bool:
        return bool(self.untrained or self.unshared)

    def __str__(self) -> str:
        """What is different, and what to do."""
        return "; ".join(f"{words}: {which}; {do}" for words, which, do in self.said())

    def said(self) -> Iterator[tuple[str, str, str]]:
        """Of each: what is different, which tensors, and what to do."""
        if self.untrained:
            do = f"join(private={[*self.patterns]}) keeps it local, or freeze it before join, if it never changes"
            yield "shared, but in no optimizer: a target network, a teacher?", _some(self.untrained), do
        if self.unshared:
            shapes = _some([str(shape) for shape in self.unshared])
            do = "join([model, loss]) shares what is in both; else every learner keeps its own"
            yield "in the optimizer, but not in the model: a head in the loss?", f"tensors of shape {shapes}", do


def differences(chosen: SharedSet, optimizers: Iterable[Any], others: Collection[str] = ()) -> Differences:
    """`optimizers`: those that step on this model. What is frozen at the moment may be in none, and so may be `others`,
    by name."""
    known = {id(one): name for name, objects in chosen.objects.items() for one in objects}
    held: dict[int, Tensor] = {}
    for optimizer in optimizers:
        held |= {id(one): one for group in optimizer.param_groups for one in group["params"]}
    trained = {known[i] for i in held if i in known}
    untrained = [
        name for name in chosen.shared
        if name not in trained and name not in others and any(one.requires_grad for one in chosen.objects[name])
    ]  # fmt: skip
    unshared = tuple(tuple(one.shape) for i, one in held.items() if i not in known)
    return Differences(tuple(untrained), tuple(_patterns(untrained, chosen.all.keys() - {*untrained})), unshared)


def _patterns(names: Collection[str], others: Collection[str]) -> Iterator[str]:
    """The shortest paths below which there is nothing else."""
    seen: set[str] = set()
    for name in names:
        parts = name.split(".")
        paths = (".".join(parts[:length]) + "." for length in range(1, len(parts)))
        found = next((path for path in paths if not any(other.startswith(path) for other in others)), None)
        pattern = name if found is None else f"{found}*"
        if pattern not in seen:
            seen.add(pattern)
            yield pattern


def _some(found: Collection[str]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{', '.join([*found][:SHOWN])}{more}"


def inner_of(optimizers: Iterable[Any]) -> str:
    """What steps most of the elements that these optimizers have: ADAM or OTHER; empty: there are none.

    By the names of their classes: state says it only after a step, and every maker keeps it under other names.
    """
    elements = {ADAM: 0, OTHER: 0}
    for optimizer in optimizers:
        kind = ADAM if _is_kin(optimizer) else OTHER
        elements[kind] += sum(one.numel() for group in optimizer.param_groups for one in group["params"])
    if not any(elements.values()):
        return ""
    return ADAM if elements[ADAM] > elements[OTHER] else OTHER


def _is_kin(optimizer: Any) -> bool:
    names = " ".join(kind.__name__ for kind in type(optimizer).__mro__).lower()
    if any(name in names for name in KIN):
        return not any(name in names for name in NO_KIN)
    inside = next((vars(optimizer)[name] for name in INSIDE if name in getattr(optimizer, "__dict__", {})), None)
    return inside is not None and inside is not optimizer and _is_kin(inside)
