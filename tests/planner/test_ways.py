"""Other ways of training on the same chips."""

from dataclasses import replace

import pytest

from diloco_planner.chips import Failures, Island
from diloco_planner.plans import LearnerPlan
from diloco_planner.ways import Sent, baselines

HOUR = 3600.0
DAY = 24 * HOUR
SENT = Sent(0, 0, 0, 24)
PREEMPTED = Failures(mtbi_s=1e15, preempt_every_s=5 * HOUR, preempt_for_s=HOUR, loss_s=300, join_s=300, restart_s=900)


def learners(count: int, failures: Failures = PREEMPTED, begins_s: float = 0.0) -> list[LearnerPlan]:
    plans = [LearnerPlan(f"learner-{i}", Island(256), failures) for i in range(count)]
    return [replace(plan, begins_s=begins_s) if i < count // 2 else plan for i, plan in enumerate(plans)]


@pytest.mark.parametrize(("count", "restart", "elastic"), [(1, 0.83, 0.83), (8, 0.35, 0.65), (32, 0.02, 0.30)])
def test_each_preemption_stops_all_of_data_parallel_training(count: int, restart: float, elastic: float) -> None:
    found = baselines(learners(count), SENT, 30 * DAY, 0)
    assert found["dp_restart"] == pytest.approx(restart, abs=0.06)
    assert found["dp_elastic"] == pytest.approx(elastic, abs=0.06)


def test_in_step_all_are_as_slow_as_the_slowest_and_tokens_count() -> None:
    """A fast learner has three quarters of the tokens, and waits for one that is half as fast."""
    fast = LearnerPlan("fast", Island(256), Failures(mtbi_s=1e15), tokens_per_step=3_000_000)
    slow = replace(fast, name="slow", step_s=2.0, tokens_per_step=1_000_000)
    found = baselines([fast, slow], SENT, DAY, 0)
    assert found == pytest.approx(dict.fromkeys(found, (4 / 2) / (3 + 1 / 2)), abs=2e-3)
