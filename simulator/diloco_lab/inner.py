"""The inner steps of all learners of a run: one by one, or together where the task can do that.

A learner's values are at rest from one step boundary to the next, so its next step can be calculated at any time in
between: when the first learner needs its step, all that wait are calculated together. Only its rate is then that of the
progress at the time, up to one step earlier than if it were alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from diloco_common.settings import Settings
from diloco_lab.tasks import Stackable, Task, inner_step
from diloco_worker.core.momentum import Companion
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.shell.companions import Companions


class InnerSteps:
    """Models, optimizers and data of the learners, by index."""

    def __init__(self, settings: Settings, task: Task, learners: int) -> None:
        self.models = [task.model() for _ in range(learners)]
        self._clip = settings.train.clip
        self._average = settings.train.average_momentum
        self._task = task
        self._streams = [task.stream(i, learners) for i in range(learners)]
        self._stack = task.stack(self.models) if isinstance(task, Stackable) else None
        self._optimizers = [] if self._stack else [task.optimizer(model) for model in self.models]
        self._done: dict[int, tuple[float, int]] = {}  # learner -> loss and tokens of its next step
        self._gone: set[int] = set()

    def step(self, index: int, share_of: Callable[[int], float]) -> tuple[float, int]:
        """The step of one learner: its loss and tokens. `share_of`: the share of its highest rates that one takes."""
        if index not in self._done:
            rows = [index]
            if self._stack is not None:
                rows = [row for row in range(len(self.models)) if row not in self._done and row not in self._gone]
            batches = [self._streams[row].next_batch() for row in rows]
            shares = [share_of(row) for row in rows]
            inputs, targets = (torch.stack(tensors) for tensors in zip(*batches, strict=True))
            if self._stack is not None:
                losses = self._stack.step(rows, inputs, targets, shares)
            else:
                model, optimizer = self.models[index], self._optimizers[index]
                loss = inner_step(self._task, model, optimizer, inputs[0], targets[0], shares[0], self._clip)
                losses = [float(loss)]
            self._done |= {row: (loss, inputs[0].numel()) for row, loss in zip(rows, losses, strict=True)}
        return self._done.pop(index)

    def companions(self, index: int) -> Mapping[str, Companion]:
        """The first moments of a learner's optimizer that are averaged, by parameter, as long as it lives."""
        if not self._average:
            return {}
        if self._stack is not None:
            return self._stack.companions(index)
        return Companions(self._optimizers[index], SharedSet(self.models[index])).by_name

    def leave(self, index: int) -> None:
        """A learner is gone, and with it the step that was calculated ahead."""
        self._gone.add(index)
        self._done.pop(index, None)

    def begin(self, index: int) -> None:
        """It is back, and its optimizer begins again."""
        self._gone.remove(index)
        if self._stack is not None:
            self._stack.begin(index)
        else:
            self._optimizers[index] = self._task.optimizer(self.models[index])
