"""`learner.follow(optimizer, samples=64)`: for loops inside a library, where there is no line to call `step` at.

A hook of the optimizer calls `Learner.step` after each of its steps; steps skipped by GradScaler do not count. Such a
loop does not check `learner.done`, so it continues after the run, and its work is in no version. The log says so once;
a callback of the library or its number of steps must end the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch.optim import Optimizer

from diloco_common.errors import ConfigError
from diloco_common.observe.logs import Log
from diloco_worker.shell.arguments import counted

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
