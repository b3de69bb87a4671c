"""Whether the user's optimizers train what is shared: looked at when the model joins, or in the first steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco_common.errors import OptimizerDiffers, WrongCall, shown
from diloco_common.observe.logs import Log
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.core.trained import Differences, differences, inner_of

LOOK_AT_STEP = 3
"""By then all optimizers have stepped that a loop has, and schedules are made for them."""


class Compared:
    """Of one learner. Owned by the training thread."""

    def __init__(self, chosen: SharedSet | None, optimizer: Any = None) -> None:
        """`chosen`: what is shared; None: optimizers step on copies, and nothing is compared. `optimizer`: all that
        train it; None: not known yet. Raises WrongCall and OptimizerDiffers."""
        self._chosen = chosen
        self.optimizers: dict[int, Any] = {}
        """Those that are known to train the model, by their identity."""
        self.inner = ""
        """What they are, as the shards hear it."""
        self._with_gradient: set[str] = set()  # so some optimizer trains it, perhaps one that nobody has shown
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
        """This is one of those that train it."""
        self.optimizers[id(optimizer)] = optimizer
        self.inner = inner_of(self.optimizers.values())

    def stepped(self, log: Log) -> None:
        """An inner step has ended. Says what is different, once."""
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
    """None, one or several."""
    if optimizers is None:
        return ()
    return optimizers if isinstance(optimizers, Sequence) else (optimizers,)
