"""Records the trace of a run: the production cores decide, and noise takes the place of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

from diloco_common.settings import Settings
from diloco_lab.arms import Conditions
from diloco_lab.lockstep import LockstepRun
from diloco_lab.stacked import Stack
from diloco_lab.tasks import InnerSteps, Task
from diloco_lab.trace import Event, Steps, Trace

NOISE = 1e-3
"""Of every element at every step: contributions of all learners are alike, and none is as long as a model that begins
small, which would be refused."""


class Noise(InnerSteps):
    """Walks at random in the place of training."""

    def __init__(self, settings: Settings, task: Task, conditions: Conditions, run: LockstepRun) -> None:
        super().__init__(settings, task, conditions.learners)
        self._run = run
        self._tokens = task.tokens_per_batch
        self._taken: dict[int, tuple[float, int]] = {}
        self._generator = torch.Generator().manual_seed(settings.run.seed)

    def step(self, index: int, share_of: Callable[[int], float]) -> tuple[float, int]:
        if index not in self._taken:
            rows = [row for row in range(len(self.models)) if row not in self._taken and row not in self._gone]
            taken = tuple(self._run.learners[f"worker-{row}"].core.inner_step for row in rows)
            self._run.note(Steps(tuple(rows), self._run.fraction, taken))
            self._walk(rows)
            self._taken |= dict.fromkeys(rows, (1.0, self._tokens))
        return self._taken.pop(index)

    def leave(self, index: int) -> None:
        super().leave(index)
        self._taken.pop(index, None)

    def _walk(self, rows: list[int]) -> None:
        assert isinstance(self._stack, Stack)
        for values in (self._stack.theta, self._stack.momentum):
            values[rows] += NOISE * torch.randn(len(rows), values.shape[1], generator=self._generator)


def record(settings: Settings, task: Task, conditions: Conditions) -> Trace:
    """The trace of these settings, whatever their seed and rates are."""
    events: list[Event] = []
    run = LockstepRun(settings, task, conditions, events.append, partial(_noise, settings, task, conditions))
    outcome = run.run()
    manifest = run.shards[0].shard.manifest
    assert manifest is not None
    refused = {fate for fate in outcome.fates if fate.isupper()}
    return Trace(manifest, tuple(events), asdict(outcome), not refused and not outcome.stalled)


def _noise(settings: Settings, task: Task, conditions: Conditions, run: LockstepRun) -> Noise:
    return Noise(settings, task, conditions, run)
