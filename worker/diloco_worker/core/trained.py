"""Compares what optimizers train with what is shared: names the differences, and the line of code that fixes each.

A target network that requires gradients is in the model but in no optimizer, and merging it would be wrong. A head
inside the loss is in the optimizer but not in the model, so every learner trains its own.
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
"""Parts of class names of Adam-like optimizers, which divide by a mean of squared gradients, such as AdamW8bit."""
NO_KIN = ("muon",)
"""MuonWithAuxAdam treats the matrices, nearly all of a model, differently."""
INSIDE = ("optimizer", "_optimizer", "optim", "base_optimizer")
"""Attributes in which wrappers (accelerate, Lightning and others) keep the optimizer."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences between a model and its optimizers. False if there are none."""

    untrained: tuple[str, ...] = ()
    """Shared parameters that require a gradient and are in no optimizer."""
    patterns: tuple[str, ...] = ()
    """The fewest patterns that match these and nothing else."""
    unshared: tuple[tuple[int, ...], ...] = ()
    """Shapes of tensors that are in an optimizer and not in the model."""

    def __bool__(self) -> bool:
        return bool(self.untrained or self.unshared)

    def __str__(self) -> str:
        return "; ".join(f"{words}: {which}; {do}" for words, which, do in self.said())

    def said(self) -> Iterator[tuple[str, str, str]]:
        """For each: the difference, which tensors, and what to do."""
        if self.untrained:
            do = f"join(private={[*self.patterns]}) keeps it local, or freeze it before join, if it never changes"
            yield "shared, but in no optimizer: a target network, a teacher?", _some(self.untrained), do
        if self.unshared:
            shapes = _some([str(shape) for shape in self.unshared])
            do = "join([model, loss]) shares what is in both; else every learner keeps its own"
            yield "in the optimizer, but not in the model: a head in the loss?", f"tensors of shape {shapes}", do


def differences(chosen: SharedSet, optimizers: Iterable[Any], others: Collection[str] = ()) -> Differences:
    """`optimizers`: all of this model. Parameters that are frozen now, or named in `others`, need not be in one."""
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
    """The shortest paths with only these names below."""
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
    """ADAM or OTHER, whichever steps on more elements; "" without optimizers.

    By class names: state exists only after a step, and differs from library to library.
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
