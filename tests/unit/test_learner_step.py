"""What `learner.step` does with what has arrived: in order, one version at least, not longer than its budget."""

from __future__ import annotations

import pytest
from torch import nn

from diloco_common.errors import Superseded
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, FragmentStatus
from diloco_worker import learner as shell
from diloco_worker.core.acts import OfferSeed, PushContribution, StepEnded, VersionApplied
from diloco_worker.core.events import Asked, Failed
from diloco_worker.core.replica import Replica
from diloco_worker.shell.boundary import SEED_HOLD_S
from parts import EPOCH, POLICY, Parts, Rig, joined


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
    monkeypatch.setattr(shell, "APPLY_SHARE", 0.0)


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


@pytest.mark.usefixtures("no_time")
def test_a_poll_has_no_budget(rig: Rig) -> None:
    for i in range(3):
        rig.arrives(i, 1, 20.0)
    rig.learner.poll()
    assert rig.versions == [1, 1, 1]


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


@pytest.mark.usefixtures("all_the_time")
def test_a_step_wakes_the_network_thread_once(rig: Rig) -> None:
    """However much happened in it: contributions, applied versions, progress."""
    rig.hears(Asked(Collect(2, 1, EPOCH), EPOCH))
    rig.arrives(0, 1, 20.0)
    rig.arrives(1, 1, 20.0)
    rig.learner.step(1)
    assert [[type(act) for act in acts] for acts in rig.parts.posted.acts] == [
        [VersionApplied, VersionApplied, PushContribution, StepEnded]
    ]


@pytest.mark.parametrize(("error", "settle_s"), [(KeyboardInterrupt, shell.HURRY_S), (ValueError, shell.SETTLE_S)])
def test_pushes_under_way_get_less_time_after_ctrl_c(rig: Rig, error: type[BaseException], settle_s: float) -> None:
    with pytest.raises(error), rig.learner:
        raise error
    assert rig.parts.posted.settle_s == settle_s


@pytest.mark.parametrize(
    ("joins", "holds"),
    [
        # A shard with a progress timeout of 4 s takes back the lease of a learner that waits; it would never seed.
        ([(0.0, 5), (4.0, 5), (4.0, 5), (4.0, 5)], [SEED_HOLD_S, SEED_HOLD_S - 4.0, SEED_HOLD_S - 8.0, 0.0]),
        # Those that have trained on it come back when the shard does.
        ([(0.0, 5), (SEED_HOLD_S, 6)], [SEED_HOLD_S, SEED_HOLD_S]),
    ],
    ids=["it goes on through leases that are shorter", "it begins anew with the shard"],
)
def test_a_resumed_learner_leaves_it_to_others_for_a_while_to_seed_a_shard_that_has_nothing(
    joins: list[tuple[float, int]], holds: list[float]
) -> None:
    model, parts, found = nn.Linear(2, 2, bias=False), Parts(), []
    learner, digest = parts.learner(model, resumed=True), cut(Replica(model).specs, 1, 1).digest
    for after_s, epoch in joins:
        parts.clock.now += after_s
        learner._inbox.put(joined(epoch, POLICY, fragments=[FragmentStatus(0, False, 0, 0, epoch)], digest=digest))
        learner.poll()
        found += [act.hold_s for act in parts.posted.acts[-1] if isinstance(act, OfferSeed)]
    assert found == holds
