"""Who is in a cluster and how it is: one model of which the terminal, `--json` and the page are views. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_deploy.cluster.members import SeenMember
from diloco_deploy.cluster.model import Cluster, Pace
from diloco_deploy.cluster.roll_call import ClusterRecord, MemberRecord, Roll, roll_call
from diloco_deploy.run.members import Watch
from diloco_deploy.status import ClusterStatus
from diloco_deploy.web.feed import Feed
from statuses import learner, shard, worker

NOW = 1000.0
KILLED = {"since": NOW - 12, "why": "died (signal 9)"}


def record(**processes: str) -> ClusterRecord:
    names = {name.replace("_", "-"): process for name, process in processes.items()}
    members = {
        name: MemberRecord(role="shard" if name[0] == "s" else "worker", process=process, **KILLED)
        for name, process in names.items()
    }
    return ClusterRecord(shards=2, workers=2, members=members)


def called(*said: dict[str, Any], known: ClusterRecord | None = None, silent: tuple[str, ...] = ()) -> Roll:
    """A roll call in which these answer, each at an address, and those in `silent` do not."""
    answers = {str(one["name"]): one for one in said}
    return roll_call({**{name: f"{name}:1" for name in answers}, **{s: s for s in silent}}, answers, known, NOW)


def away(index: int | None, for_s: float) -> list[dict[str, Any]]:
    return [{"address": "ps-1:50051", "index": index, "for_s": for_s}]


def of(*members: SeenMember) -> Cluster:
    return Cluster({member.name: member for member in members})


@pytest.mark.parametrize(
    ("at_0", "at_1", "word"),
    [
        ("alive", "alive", "training"),
        ("alive", "evicted", "partly"),
        ("evicted", "alive", "partly"),
        ("stalled", "alive", "stalled"),
        ("evicted", "evicted", "away"),
        ("left", "left", "left"),
        (None, None, "away"),
    ],
)
def test_every_view_says_the_same_of_a_learner(at_0: str | None, at_1: str | None, word: str) -> None:
    bob = learner("bob")
    said = [shard(i, *([learner("ann", state)] if state else []), bob) for i, state in enumerate((at_0, at_1))]
    feed = Feed(NOW)
    feed.expect(["shard-0", "shard-1"])
    for now in (NOW, NOW + 1):  # it was there before
        for index in (0, 1):
            status = said[index] if now > NOW else shard(index, learner("ann"), bob)
            feed.heard(f"shard-{index}", status, None, now, now)
    (row,) = feed.learners(sort="id", descending=False, find="ann", page=0, now=NOW)["rows"]
    assert row["state"] == word
    known = {one.name: one.state for one in ClusterStatus.of(called(*said)).members}
    assert known.get("ann", "away") == word


@pytest.mark.parametrize(
    ("member", "state"),
    [
        (SeenMember("worker-0", "worker", "up"), "starting"),
        (SeenMember("worker-0", "worker", "up", worker()), "training"),
        (SeenMember("gone", "worker", "up", worker()), "away"),
        (SeenMember("hurt", "worker", "up", worker()), "left_out"),
        (SeenMember("worker-0", "worker", "up", worker(), heard_at=NOW - 7), "silent 7s"),
        (SeenMember("worker-0", "worker", "died", worker()), "died"),
        (SeenMember("shard-0", "shard", "up", shard(0, ready=False)), "not ready"),
    ],
)
def test_a_member_is_described_by_the_worst_that_is_known(member: SeenMember, state: str) -> None:
    hurt = learner("hurt", left_out=True)
    known = [learner("worker-0"), learner("gone", "evicted"), hurt]
    assert of(SeenMember("shard-9", "shard", "up", shard(9, *known)), member).state_of(member, NOW) == state


def test_sums_are_taken_over_shards_and_workers() -> None:
    shards = [SeenMember(f"s{i}", "shard", "up", shard(i, rounds=10, evictions=1)) for i in (0, 1)]
    totals = of(*shards, *(SeenMember(name, "worker", "up", worker(loss=loss)) for name, loss in (("a", 2), ("b", 3))))
    found = totals.totals()
    assert (found.tokens, found.tokens_merged, found.tokens_budget) == (600_000, 1000, 4000)
    assert (found.loss, found.tokens_per_s, found.tokens_carried) == (2.5, 2000.0, 20)
    assert (found.rounds, found.participants_mean, found.late, found.evictions) == (20, 2.0, 2, 2)
    assert (found.bytes_pushed, found.bytes_pulled, found.done) == (200, 400, False)


def test_progress_and_budget_do_not_move_while_a_shard_starts_again() -> None:
    watch = Watch(0.0)
    for index, merged in enumerate((400, 800)):
        watch.expect(f"shard-{index}", "shard")
        watch.heard(f"shard-{index}", shard(index, tokens_merged=merged), 1.0)
    for name in ("shard-0", "shard-1"):
        watch.expect(name, "shard")
    assert (watch.cluster.tokens_merged, watch.cluster.tokens_budget) == (600, 4000), "nobody has answered yet"
    watch.heard("shard-1", shard(1, tokens_merged=0, fragments=[]), 3.0)
    assert watch.cluster.tokens_merged == 600, "it reads its versions"
    watch.heard("shard-1", shard(1, tokens_merged=802), 4.0)
    assert watch.cluster.tokens_merged == 601


@pytest.mark.parametrize(
    ("heard", "left_s"),
    [
        ([(0, 0)], None),  # one point has no pace
        ([(0, 0), (1, 50)], None),  # a moment has none either
        ([(0, 0), (1, 50), (5, 250)], 15.0),
        ([*((now, 0) for now in range(101)), (105, 500)], 5.0),  # the time before the first version is none
    ],
)
def test_the_time_left_follows_the_pace_of_merging(heard: list[tuple[int, int]], left_s: float | None) -> None:
    pace = Pace()
    for now, merged in heard:
        pace.heard(now, merged)
    assert pace.left_s(1000) == (None if left_s is None else pytest.approx(left_s))


@pytest.mark.parametrize(
    ("known", "silent", "presence", "why"),
    [
        # A learner that was started after the shard had died does not know which one it is.
        ([learner("a", away=away(None, 12.0))], (), "away", "1 of 1 learners do not reach it"),
        ([learner("a", away=away(1, 12.0)), learner("b"), learner("c")], (), "alive", "2 of 3 learners reach it"),
        ([learner("a", "evicted")], (), "unknown", ""),
        ([learner("a", "evicted")], ("ps-1:8080",), "away", "nobody answers at ps-1:8080"),  # the only missing one
    ],
)
def test_what_is_known_of_a_shard_that_did_not_answer(known, silent, presence, why) -> None:
    roll = called(shard(0, *known), silent=silent)
    (one,) = [one for one in roll.present if one.name == "shard-1"]
    assert (one.presence, one.why, one.answered) == (presence, why, False)
    codes = [problem.code for problem in roll.problems if problem.member == "shard-1"]
    assert codes == {"away": ["SHARD_AWAY"], "unknown": ["SHARD_UNKNOWN"]}.get(presence, [])


@pytest.mark.parametrize(
    ("process", "presence", "since_s"),
    [("died", "dead", 12.0), ("starting", "starting", None), ("ended", "left", None)],
)
def test_the_record_says_who_died_and_since_when(process: str, presence: str, since_s: float | None) -> None:
    known = record(shard_0="up", shard_1="up", worker_0="up", worker_1=process)
    roll = called(shard(1), worker("worker-0"), known=known)
    assert [(o.presence, o.since_s) for o in roll.present if o.name == "worker-1"] == [(presence, since_s)]
