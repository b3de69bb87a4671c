"""One question to the planner, and its whole answer: the run of the cores, other ways of training, costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from diloco_common.codec import num_payload_bytes
from diloco_common.settings import Settings
from diloco_planner.described import Described
from diloco_planner.money import Bill, bill
from diloco_planner.plans import LearnerPlan, RunOutcome
from diloco_planner.ways import Sent, baselines
from diloco_planner.world import PlannedWorld

_MANY = 1 << 20


def bits_of(encoding: str) -> float:
    """Bits per parameter, including scales and indices."""
    return 8 * num_payload_bytes(encoding, _MANY) / _MANY


@dataclass(frozen=True)
class Run:
    """The question."""

    settings: Settings
    params: float
    learners: tuple[LearnerPlan, ...]
    described: Described
    hours: float
    seed: int = 0

    @cached_property
    def sent(self) -> Sent:
        sync = self.settings.sync
        return Sent(self.params, bits_of(sync.push), bits_of(sync.pull), sync.first_every)

    def carry_out(self, told: Callable[[float], None] | None = None) -> SimulatedRun:
        """`told` is called now and then with the simulated seconds so far."""
        began = time.perf_counter()
        until = self.hours * 3600
        world = PlannedWorld(self.settings, self.params, self.learners, self.described.shards, until, self.seed)
        outcome = world.run(told)
        others = baselines(self.learners, self.sent, until, self.seed)
        return SimulatedRun(
            self, outcome, others, bill(self.described, self.learners, outcome), time.perf_counter() - began
        )


@dataclass(frozen=True)
class SimulatedRun:
    """The answer."""

    asked: Run
    outcome: RunOutcome
    baselines: dict[str, float]
    bill: Bill | None
    """None if the file has no prices."""
    wall_s: float
