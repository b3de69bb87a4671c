"""`learner.follow(optimizer, samples=64)`: for loops inside a library, where there is no line to call `step` at.

An optimizer that has stepped calls its hooks, and this one calls `Learner.step`. Steps that GradScaler leaves out do
not count, then. A loop in a library does not ask `learner.done`: it goes on, and what it trains is in no version any
more. That is said once; a callback of the library, or its number of steps, ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch.optim import Optimizer

from diloco_common.errors import ConfigError
from diloco_common.observe.logs import Log
from diloco_worker.shell.arguments import counted

Amount = int | Callable[[], int]
"""Of each step; a function is asked after each."""


class Stepping(Protocol):
    """A learner, as this needs it."""

    @property
    def done(self) -> bool:
        """Whether the run is over."""

    def step(self, tokens: int | None = None, *, samples: int | None = None) -> None:
        """An inner step has ended."""


class Following:
    """Calls `step` of a learner after each step of an optimizer, until it is removed."""

    def __init__(
        self, learner: Stepping, optimizer: Optimizer, tokens: Amount | None, samples: Amount | None, log: Log
    ) -> None:
        """Raises ConfigError."""
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
        """Leave nothing in the optimizer. Repeating it is fine."""
        self.is_removed = True
        self._handle.remove()

    def _stepped(self, *_: object) -> None:
        if self._is_over and not self._is_told:  # before this step began: a loop that ends in time hears nothing
            self._is_told = True
            self._log.warning("the run is over: what this loop trains from now on is in no version; end it")
        self._learner.step(_now(self._tokens), samples=_now(self._samples))
        self._is_over = self._learner.done


def _now(amount: Amount | None) -> int | None:
    return amount() if callable(amount) else amount
