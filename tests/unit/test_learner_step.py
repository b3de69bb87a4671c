"""What `learner.step` does with what has arrived: in order, one version at least, not longer than its budget."""

from __future__ import annotations

import pytest

from diloco_common.errors import Superseded
from diloco_common.wire.calls import HURRY_S, SETTLE_S
from diloco_common.wire.messages import Collect
from diloco_worker.core.events import Asked, Failed
from diloco_worker.shell import crossing as shell
from parts import EPOCH, Rig


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


@pytest.fixture
def all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "APPLY_S", 3600.0)


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


@pytest.fixture
def reading(rig: Rig) -> Rig:
    """A step has taken a contribution of fragment 0; its snapshot is still to be taken (`snapshots="background"`)."""
    rig.learner._boundary.replica.reads_later = True
    rig.hears(Asked(Collect(0, 2, EPOCH), EPOCH))
    rig.learner.step(1)
    assert rig.learner.core.fragments[0].contribution is not None
    assert len(rig.parts.jobs.waiting) == 1, "it is encoded without a word from the network thread"
    rig.arrives(0, 1, 20.0)
    return rig


@pytest.mark.usefixtures("all_the_time")
def test_a_version_waits_while_its_fragment_is_read_and_those_behind_it_too(reading: Rig) -> None:
    reading.arrives(1, 1, 20.0)
    reading.learner.step(1)
    assert reading.versions == [0, 0, 0], "nothing overtakes"
    reading.parts.jobs.run()
    reading.learner.step(1)
    assert (reading.versions, reading.values) == ([1, 1, 0], [20.0, 20.0, 10.0])


def test_the_end_is_heard_even_while_a_version_waits(reading: Rig) -> None:
    reading.learner.step(1)
    reading.hears(Failed(Superseded("another process is cat now")))
    with pytest.raises(Superseded):
        reading.learner.step(1)


@pytest.mark.parametrize(("error", "settle_s"), [(KeyboardInterrupt, HURRY_S), (ValueError, SETTLE_S)])
def test_pushes_under_way_get_less_time_after_ctrl_c(rig: Rig, error: type[BaseException], settle_s: float) -> None:
    with pytest.raises(error), rig.learner:
        raise error
    assert rig.parts.posted.settle_s == settle_s
