"""The user's optimizers: checks whether they train what is shared, and follows the steps of one.

A target network that requires gradients is in the model but in no optimizer, and merging it would be wrong. A head
inside the loss is in the optimizer but not in the model, so every learner trains its own. `Compared` names such
differences, and the line of code that fixes each, when the model joins or in the first steps.

`learner.follow(optimizer, samples=64)` is for loops inside a library, where the user cannot call `step`. A hook
of the optimizer calls `Learner.step` after each of its steps; steps skipped by GradScaler do not count. Such a loop
does not check `learner.done`, so it continues after the run, and its work is in no version. The log says so once; a
callback of the library or its number of steps must end the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from diloco_common.errors import ConfigError, OptimizerDiffers, WrongCall, shown, some
from diloco_common.observe.logs import Log
from diloco_common.wire.messages import ADAM, OTHER
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.shell.arguments import counted

LOOK_AT_STEP = 3
"""By this step all optimizers of a loop have stepped, and their schedules exist."""


class Compared:
    """The check for one learner. Owned by the training thread."""

    def __init__(self, chosen: SharedSet | None, optimizer: Any = None) -> None:
        """`chosen`: what is shared; None: optimizers step on copies, and nothing is compared. `optimizer`: all those of
        this model; None: not known yet. Raises WrongCall and OptimizerDiffers."""
        self._chosen = chosen
        self.optimizers: dict[int, Any] = {}
        """Optimizers known to train the model, by id."""
        self.inner = ""
        """Their kind, as reported to the shards (`inner_of`)."""
        self._with_gradient: set[str] = set()  # some optimizer trains these, perhaps one that we do not know
        self._steps_left = LOOK_AT_STEP
        if optimizer is None:
            return
        for one in several(optimizer):
            if not hasattr(one, "param_groups"):
                raise WrongCall(f"optimizer= is {shown(one)}: give the one that trains the model, or a list of all")
            self.has(one)
        if self._chosen is not None and (found := [*differences(self._chosen, self.optimizers.values())]):
            raise OptimizerDiffers("; ".join(f"{words}: {which}; {do}" for words, which, do in found))
        self._chosen = None

    def has(self, optimizer: Any) -> None:
        """Note an optimizer of this model."""
        self.optimizers[id(optimizer)] = optimizer
        self.inner = inner_of(self.optimizers.values())

    def stepped(self, log: Log) -> None:
        """An inner step ended. Logs the differences, once."""
        if self._chosen is None:
            return
        self._with_gradient |= {name for name, one in self._chosen.shared.items() if one.grad is not None}
        self._steps_left -= 1
        if self._steps_left:
            return
        found = differences(self._chosen, self.optimizers.values(), self._with_gradient) if self.optimizers else ()
        for words, which, do in found:
            log.warning(words, code=OptimizerDiffers.code, tensors=which, do=do)
        self._chosen = None


def several(optimizers: Any) -> Sequence[Any]:
    """None, one or several optimizers as a sequence."""
    if optimizers is None:
        return ()
    return optimizers if isinstance(optimizers, Sequence) else (optimizers,)


KIN = ("adam", "lamb", "adafactor", "soap", "adan")
"""Parts of class names of Adam-like optimizers, which divide by a mean of squared gradients, such as AdamW8bit."""
NO_KIN = ("muon",)
"""MuonWithAuxAdam treats the matrices, nearly all of a model, differently."""
INSIDE = ("optimizer", "_optimizer", "optim", "base_optimizer")
"""Attributes in which wrappers (accelerate, Lightning and others) keep the optimizer."""


class Mismatch(NamedTuple):
    """Tensors that only the model or only its optimizers have, and what to do about it."""

    words: str
    tensors: str
    do: str


def differences(chosen: SharedSet, optimizers: Iterable[Any], others: Collection[str] = ()) -> Iterator[Mismatch]:
    """`optimizers`: all of this model. Parameters that are frozen now, or named in `others`, need not be in any."""
    known = {id(one): name for name, objects in chosen.objects.items() for one in objects}
    held: dict[int, Tensor] = {}
    for optimizer in optimizers:
        held |= {id(one): one for group in optimizer.param_groups for one in group["params"]}
    trained = {known[i] for i in held if i in known} | {*others}
    untrained = [n for n in chosen.shared if n not in trained and any(one.requires_grad for one in chosen.objects[n])]
    if untrained:
        patterns = [*_patterns(untrained, chosen.all.keys() - {*untrained})]
        do = f"join(private={patterns}) keeps it local, or freeze it before join, if it never changes"
        yield Mismatch("shared, but in no optimizer: a target network, a teacher?", some(untrained), do)
    if unshared := [str(tuple(one.shape)) for i, one in held.items() if i not in known]:
        do = "join([model, loss]) shares what is in both; else every learner keeps its own"
        words = "in the optimizer, but not in the model: a head in the loss?"
        yield Mismatch(words, f"tensors of shape {some(unshared)}", do)


def _patterns(names: Collection[str], others: Collection[str]) -> Iterator[str]:
    """The fewest patterns that match these names and none of the others: the shortest paths above them."""
    seen: set[str] = set()
    for name in names:
        parts = name.split(".")
        paths = (".".join(parts[:length]) + "." for length in range(1, len(parts)))
        found = next((path for path in paths if not any(other.startswith(path) for other in others)), None)
        pattern = name if found is None else f"{found}*"
        if pattern not in seen:
            seen.add(pattern)
            yield pattern


def inner_of(optimizers: Iterable[Any]) -> str:
    """ADAM or OTHER, whichever steps on more elements; "" without optimizers.

    Decides by class names: state exists only after a step, and differs from library to library.
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


Amount = int | Callable[[], int]
"""Tokens or samples per step; a function is called after each step."""


class Stepping(Protocol):
    @property
    def done(self) -> bool:
        """Whether the run is over."""

    def step(self, tokens: int | None = None, *, samples: int | None = None) -> None:
        """Report the end of an inner step."""


class Following:
    """Calls a learner's `step` after each step of an optimizer, until removed."""

    def __init__(
        self, learner: Stepping, optimizer: Optimizer, tokens: Amount | None, samples: Amount | None, log: Log
    ) -> None:
        if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_post_hooks"):
            raise ConfigError(
                f"follow() has a {type(optimizer).__name__}, which calls no hooks: give the optimizer of torch.optim "
                "inside, whose step ends a step of the loop"
            )
        counted(*(0 if callable(amount) else amount for amount in (tokens, samples)))
        self._learner, self._tokens, self._samples, self._log = learner, tokens, samples, log
        self.is_removed = self._is_told = self._is_over = False
        self._handle = optimizer.register_step_post_hook(self._stepped)

    def remove(self) -> None:
        self.is_removed = True
        self._handle.remove()

    def _stepped(self, *_: object) -> None:
        if self._is_over and not self._is_told:  # over before this step began: a loop that ends in time is not warned
            self._is_told = True
            self._log.warning("the run is over: what this loop trains from now on is in no version; end it")
        self._learner.step(_now(self._tokens), samples=_now(self._samples))
        self._is_over = self._learner.done


def _now(amount: Amount | None) -> int | None:
    return amount() if callable(amount) else amount
