"""Who ought to be there and who is: one shard that answers is enough to miss the others. Pure, no process."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_deploy.cluster.record import ClusterRecord, MemberRecord
from diloco_deploy.cluster.roll_call import Roll, roll_call
from diloco_deploy.show.status import EXIT_DEGRADED, ClusterStatus, snapshot_of
from diloco_deploy.show.terminal import line

NOW = 1000.0


def learner(name: str, state: str = "alive", silent_s: float = 0.1, **more: Any) -> dict[str, Any]:
    return {
        "id": name, "state": state, "silent_s": silent_s, "inner_step": 10, "tokens": 640, "step_time_s": 0.1,
        "loss": 3.0, "merged": 4, "missed": {"LATE": 2}, "away": [], **more,
    }  # fmt: skip


def shard(index: int, count: int = 2, learners: Any = (), **more: Any) -> dict[str, Any]:
    return {
        "role": "shard", "name": f"shard-{index}", "run": "local", "index": index, "count": count, "ready": True,
        "learners": list(learners), "fragments": [{"id": index, "version": 7}], **more,
    }  # fmt: skip


def worker(name: str) -> dict[str, Any]:
    return {"role": "worker", "name": name, "run": "local", "state": "training", "tokens_per_s": 10.0}


def record(**processes: str) -> ClusterRecord:
    members = {
        name.replace("_", "-"): MemberRecord(
            role="shard" if name.startswith("shard") else "worker",
            process=process,
            since=NOW - 12,
            why="died (signal 9)",
        )
        for name, process in processes.items()
    }
    return ClusterRecord(run="local", shards=2, workers=2, fragments=24, members=members)


def away(index: int, for_s: float) -> list[dict[str, Any]]:
    return [{"address": f"ps-{index}:50051", "index": index, "for_s": for_s}]


def called(roll: Roll) -> dict[str, str]:
    return {one.name: one.presence for one in roll.present}


def test_a_run_is_as_old_as_its_oldest_process() -> None:
    answers = {"shard-0": shard(0, uptime_s=12.0), "shard-1": shard(1, uptime_s=725.0)}
    roll = roll_call(dict.fromkeys(answers, "ps:1"), answers, None, NOW)
    assert line(snapshot_of(roll), 200).startswith("12:05  ")


def test_one_shard_misses_another_that_its_learners_do_not_reach() -> None:
    learners = [learner("a", away=away(1, 12.0)), learner("b", away=away(1, 14.0)), learner("c", "evicted", 60.0)]
    roll = roll_call({"ps-0:8080": "ps-0:8080"}, {"ps-0:8080": shard(0, learners=learners)}, None, NOW)
    assert called(roll) == {"shard-0": "alive", "shard-1": "away", "a": "alive", "b": "alive", "c": "away"}
    (gone, c) = roll.problems
    assert (gone.code, gone.member) == ("SHARD_AWAY", "shard-1")
    assert "away for 0:13 (2 of 2 learners do not reach it): half of the model is away" in gone.words
    assert (c.code, c.words.split(":")[0]) == ("WORKER_AWAY", "c is away for 1")


def test_a_shard_that_no_learner_has_ever_reached_is_away() -> None:
    """A learner that was started after the shard had died does not know which one it is."""
    never = [{"address": "ps-1:50051", "index": None, "for_s": 12.0}]
    roll = roll_call({"x": "x"}, {"x": shard(0, learners=[learner("a", away=never)])}, None, NOW)
    assert called(roll)["shard-1"] == "away"


def test_one_learner_alone_makes_no_shard_away() -> None:
    learners = [learner("a", away=away(1, 12.0)), learner("b"), learner("c")]
    roll = roll_call({"x": "x"}, {"x": shard(0, learners=learners)}, None, NOW)
    assert called(roll)["shard-1"] == "alive"
    assert roll.present[1].why == "2 of 3 learners reach it"
    assert not roll.present[1].answered


def test_a_shard_of_which_nobody_speaks_is_unknown_and_not_alive() -> None:
    roll = roll_call({"x": "x"}, {"x": shard(0)}, None, NOW)
    assert called(roll) == {"shard-0": "alive", "shard-1": "unknown"}
    assert roll.problems[0].code == "SHARD_UNKNOWN"


def test_the_only_silent_address_is_the_only_missing_shard() -> None:
    roll = roll_call({"x": "x:1", "ps-1:8080": "ps-1:8080"}, {"x": shard(0)}, None, NOW)
    assert called(roll) == {"shard-0": "alive", "shard-1": "away"}
    assert roll.present[1].why == "nobody answers at ps-1:8080"


def test_workers_that_were_not_asked_are_shown_as_the_shards_hear_them() -> None:
    roll = roll_call({"x": "x"}, {"x": shard(0, 1, [learner("a"), learner("b", "left")])}, None, NOW)
    a = next(one for one in roll.present if one.name == "a")
    assert a.status is not None
    assert (a.status["tokens_per_s"], a.status["loss"], a.status["contributions"]["merged"]) == (640.0, 3.0, 4)
    assert (a.answered, a.why) == (False, "heard by 1 shard")
    status = ClusterStatus.of(roll)
    assert (status.complete, status.expected.workers) == (True, 1), "who said goodbye is not expected"


@pytest.mark.parametrize(
    ("process", "presence", "since_s"),
    [("died", "dead", 12.0), ("lost", "dead", 12.0), ("starting", "starting", None), ("ended", "left", None)],
)
def test_the_record_says_who_died_and_since_when(process: str, presence: str, since_s: float | None) -> None:
    asked = {"shard-1": "h:2", "worker-0": "h:3"}
    answers = {"shard-1": shard(1), "worker-0": worker("worker-0")}
    known = record(shard_0="up", shard_1="up", worker_0="up", worker_1=process)
    found = {one.name: one for one in roll_call(asked, answers, known, NOW).present}
    assert (found["worker-1"].presence, found["worker-1"].since_s) == (presence, since_s)


@pytest.mark.parametrize(
    ("process", "then"),
    [
        ("died", "if `diloco up` still runs, it starts it again"),
        ("up", "if `diloco up` still runs, it starts it again"),  # it has not noticed yet
        ("starting", "wait: `diloco up` starts it"),
        ("lost", "`diloco up` has given it up: look at `diloco logs shard-0`"),
        (None, "start it again with its data folder"),
    ],
)
def test_nobody_is_told_to_start_what_starts_by_itself(process: str | None, then: str) -> None:
    known = None if process is None else record(shard_0=process, shard_1="up")
    (problem,) = roll_call({"shard-0": "h:1", "shard-1": "h:2"}, {"shard-1": shard(1)}, known, NOW).problems
    assert problem.words.endswith(f"lose nothing; {then}")


def test_a_shard_killed_a_moment_ago_is_missed_although_its_record_says_up() -> None:
    asked = {"shard-0": "h:1", "shard-1": "h:2"}
    roll = roll_call(asked, {"shard-1": shard(1)}, record(shard_0="up", shard_1="up"), NOW)
    assert called(roll) == {"shard-0": "away", "shard-1": "alive"}


def test_what_is_printed_as_json_is_what_the_schema_reads() -> None:
    status = ClusterStatus.of(
        roll_call({"x": "x"}, {"x": shard(0, learners=[learner("a", away=away(1, 1.0))])}, None, NOW)
    )
    again = ClusterStatus.model_validate_json(status.model_dump_json())
    assert again == status
    assert (again.complete, again.exit_code(strict=True), again.exit_code(strict=False)) == (False, EXIT_DEGRADED, 0)
    assert [(one.name, one.presence) for one in again.members] == [
        ("shard-0", "alive"), ("shard-1", "away"), ("a", "alive"),
    ]  # fmt: skip


def test_a_complete_cluster_has_no_problems() -> None:
    answers = {"s0": shard(0, learners=[learner("a")]), "s1": shard(1, learners=[learner("a")]), "w": worker("a")}
    status = ClusterStatus.of(roll_call({name: name for name in answers}, answers, None, NOW))
    assert (status.complete, status.problems, status.exit_code(strict=True)) == (True, [], 0)
