"""What `learner.step` does with what has arrived: in order, one version at least, not longer than its budget."""

from __future__ import annotations

import pytest

from diloco_common.wire.calls import HURRY_S, SETTLE_S
from diloco_worker.shell import crossing as shell
from parts import Rig


@pytest.fixture
def rig() -> Rig:
    """Of three fragments."""
    rig = Rig(num_fragments=3)
    rig.parts.posted.acts.clear()
    yield rig
    rig.learner.close()


@pytest.fixture
def no_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes longer than a step may spend."""
    rig.parts.clock.tick = 1e-6
    monkeypatch.setattr(shell, "APPLY_S", 0.0)


@pytest.mark.usefixtures("no_time")
def test_one_version_per_step_is_applied_whatever_the_budget_and_a_newer_one_replaces_one_that_waits(rig: Rig) -> None:
    for i in range(3):
        rig.arrives(i, 1, 20.0)
    found = []
    for number in range(3):
        rig.learner.step(1)
        found.append(rig.versions)
        if number == 0:
            rig.arrives(1, 2, 30.0)
    assert found == [[1, 0, 0], [1, 2, 0], [1, 2, 1]], "in the place of the older one"


@pytest.mark.parametrize(("error", "settle_s"), [(KeyboardInterrupt, HURRY_S), (ValueError, SETTLE_S)])
def test_pushes_under_way_get_less_time_after_ctrl_c(rig: Rig, error: type[BaseException], settle_s: float) -> None:
    with pytest.raises(error), rig.learner:
        raise error
    assert rig.parts.posted.settle_s == settle_s
