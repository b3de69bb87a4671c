"""What `learner.step` does with what has arrived: in order, one version at least, not longer than its budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco_common.errors import Superseded
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, FragmentStatus, LearnerPolicy
from diloco_worker import learner as shell
from diloco_worker.core.acts import PushContribution, StepEnded, VersionApplied
from diloco_worker.core.events import Arrived, Asked, Failed
from diloco_worker.core.replica import Replica
from diloco_worker.learner import Learner
from parts import Parts, joined

EPOCH = 5
FRAGMENTS = 3
POLICY = LearnerPolicy(1, "float32", "float32", "carry", 0.5, False)


@pytest.fixture
def parts():
    return Parts()


@pytest.fixture
def model():
    """Three fragments of one element each, all 10."""
    model = nn.Module()
    for i in range(FRAGMENTS):
        setattr(model, f"w{i}", nn.Parameter(torch.full((1,), 10.0)))
    return model


@pytest.fixture
def learner(parts, model):
    """It holds version 0 of every fragment."""
    learner = parts.learner(model)
    digest = cut(Replica(model).specs, FRAGMENTS, 1).digest
    statuses = tuple(FragmentStatus(i, True, 0, 0, EPOCH) for i in range(FRAGMENTS))
    learner._inbox.put(joined(EPOCH, POLICY, num_fragments=FRAGMENTS, fragments=statuses, digest=digest))
    for i in range(FRAGMENTS):
        arrive(learner, i, 0, 10.0)
    assert learner.begin()
    parts.posted.acts.clear()
    yield learner
    learner.close()


def arrive(learner: Learner, fragment_id: int, version: int, value: float, merged_version: int = 0) -> None:
    learner._inbox.put(Arrived(fragment_id, version, EPOCH, torch.full((1,), value), merged_version))


def versions(learner: Learner) -> list[int]:
    assert learner.core is not None
    return [learner.core.fragments[i].version for i in range(FRAGMENTS)]


def values(model: nn.Module) -> list[float]:
    return [parameter.item() for parameter in model.parameters()]


def test_one_version_per_step_is_applied_whatever_the_budget(learner, parts, monkeypatch):
    parts.clock.tick = 1e-6
    monkeypatch.setattr(shell, "APPLY_S", 0.0)
    monkeypatch.setattr(shell, "APPLY_SHARE", 0.0)
    for i in range(FRAGMENTS):
        arrive(learner, i, 1, 20.0)
    found = []
    for _ in range(FRAGMENTS):
        learner.step(1)
        found.append(versions(learner))
    assert found == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_what_fits_the_budget_is_applied_at_once(learner, monkeypatch):
    monkeypatch.setattr(shell, "APPLY_S", 3600.0)
    for i in range(FRAGMENTS):
        arrive(learner, i, 1, 20.0)
    learner.step(1)
    assert versions(learner) == [1, 1, 1]


def test_a_poll_has_no_budget(learner, parts, monkeypatch):
    parts.clock.tick = 1e-6
    monkeypatch.setattr(shell, "APPLY_S", 0.0)
    for i in range(FRAGMENTS):
        arrive(learner, i, 1, 20.0)
    learner.poll()
    assert versions(learner) == [1, 1, 1]


def test_a_newer_version_replaces_one_that_waits_for_its_turn(learner, parts, monkeypatch):
    parts.clock.tick = 1e-6
    monkeypatch.setattr(shell, "APPLY_S", 0.0)
    monkeypatch.setattr(shell, "APPLY_SHARE", 0.0)
    arrive(learner, 0, 1, 20.0)
    arrive(learner, 1, 1, 20.0)
    learner.step(1)
    arrive(learner, 1, 2, 30.0)
    learner.step(1)
    assert versions(learner) == [1, 2, 0]


def taken(learner: Learner) -> None:
    """A step takes a contribution of fragment 0; its snapshot is still to be taken (`snapshots="background"`)."""
    learner._boundary.replica.reads_later = True
    learner._inbox.put(Asked(Collect(0, 2, EPOCH), EPOCH))
    learner.step(1)
    assert learner.core is not None
    assert learner.core.fragments[0].contribution is not None


def test_a_version_waits_while_its_fragment_is_read_and_those_behind_it_too(learner, parts, model, monkeypatch):
    monkeypatch.setattr(shell, "APPLY_S", 3600.0)
    taken(learner)
    arrive(learner, 0, 1, 20.0)
    arrive(learner, 1, 1, 20.0)
    learner.step(1)
    assert versions(learner) == [0, 0, 0], "nothing overtakes"
    parts.jobs.run()
    learner.step(1)
    assert versions(learner) == [1, 1, 0]
    assert values(model) == [20.0, 20.0, 10.0]


def test_a_newer_version_replaces_one_that_waits_for_the_snapshot(learner, parts):
    taken(learner)
    arrive(learner, 0, 1, 20.0)
    learner.step(1)
    arrive(learner, 0, 2, 30.0, merged_version=2)
    parts.jobs.run()
    learner.step(1)
    assert versions(learner) == [2, 0, 0]
    assert learner.core.contributions["merged"] == 1


def test_waiting_for_news_does_not_end_because_of_a_version_that_waits(learner):
    """Else a loop of `poll` would spin until the snapshot is taken."""
    taken(learner)
    arrive(learner, 0, 1, 20.0)
    learner.poll()
    assert not learner._inbox._has_new


def test_the_end_is_heard_even_while_a_version_waits(learner):
    taken(learner)
    arrive(learner, 0, 1, 20.0)
    learner.step(1)
    learner._inbox.put(Failed(Superseded("another process is cat now")))
    with pytest.raises(Superseded):
        learner.step(1)


def test_a_step_wakes_the_network_thread_once(learner, parts, monkeypatch):
    """However much happened in it: contributions, applied versions, progress."""
    monkeypatch.setattr(shell, "APPLY_S", float("inf"))
    learner._inbox.put(Asked(Collect(2, 1, EPOCH), EPOCH))
    arrive(learner, 0, 1, 20.0)
    arrive(learner, 1, 1, 20.0)
    learner.step(1)
    assert [[type(act) for act in acts] for acts in parts.posted.acts] == [
        [VersionApplied, VersionApplied, PushContribution, StepEnded]
    ]


def test_a_contribution_is_encoded_without_a_word_from_the_network_thread(learner, parts):
    taken(learner)
    assert len(parts.jobs.waiting) == 1


@pytest.mark.parametrize(("error", "settle_s"), [(KeyboardInterrupt, shell.HURRY_S), (ValueError, shell.SETTLE_S)])
def test_pushes_under_way_get_less_time_after_ctrl_c(learner, parts, error, settle_s):
    with pytest.raises(error), learner:
        raise error
    assert parts.posted.settle_s == settle_s
