"""What `learner.step` does with what has arrived: in order, one version at least, not longer than its budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco_common.errors import Superseded
from diloco_common.manifest import cut
from diloco_common.messages import Collect, FragmentStatus, LearnerPolicy
from diloco_worker import learner as shell
from diloco_worker.core.events import Arrived, Asked, Failed, Joined
from diloco_worker.core.replica import Replica
from diloco_worker.learner import Learner

EPOCH = 5
FRAGMENTS = 3
POLICY = LearnerPolicy(1, "float32", "float32", "carry", 0.5, False)


@pytest.fixture
def learner():
    """It holds version 0 of three fragments of one element each, all 10, and its network was never started."""
    model = nn.Module()
    for i in range(FRAGMENTS):
        setattr(model, f"w{i}", nn.Parameter(torch.full((1,), 10.0)))
    learner = Learner(Replica(model), ["127.0.0.1:1"], "local", "cat", None, 0, 0, None)
    digest = cut(Replica(model).specs, FRAGMENTS, 1).digest
    statuses = tuple(FragmentStatus(i, True, 0, 0, EPOCH) for i in range(FRAGMENTS))
    learner.network.links[0].session.shard_index = 0
    learner._inbox.put(Joined("127.0.0.1:1", 0, 1, FRAGMENTS, digest, POLICY, EPOCH, statuses))
    for i in range(FRAGMENTS):
        arrive(learner, i, 0, 10.0)
    learner.poll()
    yield learner
    learner.close()


def arrive(learner: Learner, fragment_id: int, version: int, value: float, merged_version: int = 0) -> None:
    learner._inbox.put(Arrived(fragment_id, version, EPOCH, torch.full((1,), value), merged_version))


def versions(learner: Learner) -> list[int]:
    assert learner.core is not None
    return [learner.core.fragments[i].version for i in range(FRAGMENTS)]


def values(learner: Learner) -> list[float]:
    return [float(v) for f in learner.core.fragments.values() for _, theta in learner._replica.views(f.fragment)
            for v in theta]  # fmt: skip


def test_one_version_per_step_is_applied_whatever_the_budget(learner, monkeypatch):
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


def test_a_poll_has_no_budget(learner, monkeypatch):
    monkeypatch.setattr(shell, "APPLY_S", 0.0)
    for i in range(FRAGMENTS):
        arrive(learner, i, 1, 20.0)
    learner.poll()
    assert versions(learner) == [1, 1, 1]


def test_a_newer_version_replaces_one_that_waits_for_its_turn(learner, monkeypatch):
    monkeypatch.setattr(shell, "APPLY_S", 0.0)
    monkeypatch.setattr(shell, "APPLY_SHARE", 0.0)
    arrive(learner, 0, 1, 20.0)
    arrive(learner, 1, 1, 20.0)
    learner.step(1)
    arrive(learner, 1, 2, 30.0)
    learner.step(1)
    assert versions(learner) == [1, 2, 0]


def taken(learner: Learner):
    """The contribution of fragment 0 that a step takes; its snapshot is still to be taken, as no thread is there."""
    learner._inbox.put(Asked(Collect(0, 2, EPOCH), EPOCH))
    learner.step(1)
    assert learner.core is not None
    return learner.core.fragments[0].pending


def test_a_version_waits_while_its_fragment_is_read_and_those_behind_it_too(learner, monkeypatch):
    monkeypatch.setattr(shell, "APPLY_S", 3600.0)
    pending = taken(learner)
    arrive(learner, 0, 1, 20.0)
    arrive(learner, 1, 1, 20.0)
    learner.step(1)
    assert versions(learner) == [0, 0, 0], "nothing overtakes"
    pending.take_snapshot()
    learner.step(1)
    assert versions(learner) == [1, 1, 0]
    assert values(learner) == [20.0, 20.0, 10.0]


def test_a_newer_version_replaces_one_that_waits_for_the_snapshot(learner):
    pending = taken(learner)
    arrive(learner, 0, 1, 20.0)
    learner.step(1)
    arrive(learner, 0, 2, 30.0, merged_version=2)
    pending.take_snapshot()
    learner.step(1)
    assert versions(learner) == [2, 0, 0]
    assert learner.core.contributions["merged"] == 1


def test_waiting_for_news_does_not_end_because_of_a_version_that_waits(learner):
    """Else a loop of `poll` would spin until the snapshot is taken."""
    taken(learner)
    arrive(learner, 0, 1, 20.0)
    learner.poll()
    assert not learner._inbox._news


def test_the_end_is_heard_even_while_a_version_waits(learner):
    taken(learner)
    arrive(learner, 0, 1, 20.0)
    learner.step(1)
    learner._inbox.put(Failed(Superseded("another process is cat now")))
    with pytest.raises(Superseded):
        learner.step(1)


def test_a_step_wakes_the_network_thread_once(learner, monkeypatch):
    """However much happened in it: contributions, applied versions, progress."""
    monkeypatch.setattr("diloco_worker.learner.APPLY_S", float("inf"))  # a busy machine applies one version per step
    handed: list[int] = []
    learner.network.soon = lambda *acts: handed.append(len(acts))
    learner._inbox.put(Asked(Collect(2, 1, EPOCH), EPOCH))
    arrive(learner, 0, 1, 20.0)
    arrive(learner, 1, 1, 20.0)
    learner.step(1)
    assert handed == [4], "two applied, one contribution, one step"
