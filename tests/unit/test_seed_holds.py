"""How long a resumed learner leaves it to others to seed a shard that has nothing."""

from __future__ import annotations

from torch import nn

from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import FragmentStatus, LearnerPolicy
from diloco_worker.core.acts import SeedFragment
from diloco_worker.core.replica import Replica
from diloco_worker.shell.boundary import SEED_HOLD_S
from parts import Parts, joined

POLICY = LearnerPolicy(1, "float32", "float32", "carry", 0.5, False)


class Rig:
    """A resumed learner of one shard, which has nothing."""

    def __init__(self) -> None:
        model = nn.Linear(2, 2, bias=False)
        self._digest = cut(Replica(model).specs, 1, 1).digest
        self.parts = Parts()
        self.learner = self.parts.learner(model, resumed=True)

    def hold_s(self, *, after_s: float, epoch: int = 5) -> float:
        """It joins after so many seconds: how long it holds its seed."""
        self.parts.clock.now += after_s
        status = FragmentStatus(0, False, 0, 0, epoch)
        self.learner._inbox.put(joined(epoch, POLICY, fragments=[status], digest=self._digest))
        self.learner.poll()
        (act,) = (act for act in self.parts.posted.acts[-1] if isinstance(act, SeedFragment))
        return act.hold_s


def test_a_hold_goes_on_through_leases_that_are_shorter() -> None:
    """A shard with a progress timeout of 4 s takes back the lease of a learner that waits; it would never seed."""
    rig = Rig()
    assert rig.hold_s(after_s=0.0) == SEED_HOLD_S
    assert rig.hold_s(after_s=4.0) == SEED_HOLD_S - 4.0
    assert rig.hold_s(after_s=4.0) == SEED_HOLD_S - 8.0
    assert rig.hold_s(after_s=4.0) == 0.0


def test_a_hold_begins_anew_with_the_shard() -> None:
    """Those that have trained on it come back when the shard does."""
    rig = Rig()
    assert rig.hold_s(after_s=0.0) == SEED_HOLD_S
    assert rig.hold_s(after_s=SEED_HOLD_S, epoch=6) == SEED_HOLD_S
