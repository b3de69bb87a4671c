"""What would never end is refused, and what people ask for is not."""

import pytest

from diloco_common.errors import ConfigError
from diloco_common.settings import SyncSettings
from diloco_planner.chips import PRESETS, Failures, Island
from diloco_planner.plans import LearnerPlan, ShardPlan, refuse_endless

MANY = Failures(mtbi_s=1e-4, loss_s=0.0)
GONE = Failures(preempt_every_s=1e-4, preempt_for_s=0.0)
SLOW = Failures(slow_every_s=1.0, slow_for_s=0.0, loss_s=0.0)


@pytest.mark.parametrize(
    ("learners", "hours", "step_s", "noise", "failures", "shards", "refused"),
    [
        (8, 24.0, 1.0, 0.0, PRESETS["paper"], ShardPlan(), ""),
        (8, 24.0, 1.0, 0.1, PRESETS["poor-cloud"], ShardPlan(2, restart_every_s=3600.0), ""),
        (100, 240.0, 1.0, 0.0, PRESETS["fleet"], ShardPlan(), ""),
        (8, 20_000.0, 1e-4, 0.0, PRESETS["paper"], ShardPlan(), "hours of one core"),
        (8, 20_000.0, 1.0, 0.0, PRESETS["paper"], ShardPlan(), "hours of one core"),
        (8, 24.0, 0.02, 0.1, PRESETS["paper"], ShardPlan(), "hours of one core"),
        (10_000, 24.0, 1.0, 0.0, PRESETS["paper"], ShardPlan(), "hours of one core"),
        (8, 24.0, 1.0, 0.0, PRESETS["paper"], ShardPlan(4000, restart_every_s=1e-4, restart_s=0.0), "of one core"),
        (8, 24.0, 1.0, 0.0, MANY, ShardPlan(), "chips would fail or come back 1.1e[+]15 times in 24 hours"),
        (8, 24.0, 1.0, 0.0, GONE, ShardPlan(), "chips would fail or come back"),
        (8, 24.0, 1.0, 0.0, SLOW, ShardPlan(), "chips would fail or come back"),
    ],
)
def test_what_would_never_end_is_refused(
    learners: int, hours: float, step_s: float, noise: float, failures: Failures, shards: ShardPlan, refused: str
) -> None:
    plans = [LearnerPlan("a", Island(640_000 / learners), failures, step_s, noise)] * learners
    if not refused:
        refuse_endless(SyncSettings(), plans, shards, 3600 * hours)
    else:
        with pytest.raises(ConfigError, match=refused):
            refuse_endless(SyncSettings(), plans, shards, 3600 * hours)
