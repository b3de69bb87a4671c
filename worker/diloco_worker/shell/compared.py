"""Checks that the user's optimizers train what is shared: when the model joins, or in the first steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco_common.errors import OptimizerDiffers, WrongCall, shown
from diloco_common.observe.logs import Log
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.core.trained import Differences, differences, inner_of

LOOK_AT_STEP = 3
"""By this step all optimizers of a loop have stepped, and their schedules exist."""


class Compared:
    """The check for one learner. Owned by the training thread."""

    def __init__(self, chosen: SharedSet | None, optimizer: Any = None) -> None:
        """`chosen`: what is shared; None: optimizers step on copies, and nothing is compared. `optimizer`: all of this
        model; None: not known yet. Raises WrongCall and OptimizerDiffers."""
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
        if found := self._found():
            raise OptimizerDiffers(str(found))
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
        for words, which, do in self._found().said() if self.optimizers else ():
            log.warning(words, code=OptimizerDiffers.code, tensors=which, do=do)
        self._chosen = None

    def _found(self) -> Differences:
        if self._chosen is None:
            return Differences()
        return differences(self._chosen, self.optimizers.values(), self._with_gradient)


def several(optimizers: Any) -> Sequence[Any]:
    """None, one or several optimizers as a sequence."""
    if optimizers is None:
        return ()
    return optimizers if isinstance(optimizers, Sequence) else (optimizers,)
