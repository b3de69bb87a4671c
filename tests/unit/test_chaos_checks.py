"""The checks of `diloco chaos`: clean histories pass, and each planted violation is found by the check for it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from diloco_deploy.chaos.account import LOSSES, account
from diloco_deploy.chaos.checks import stood_still, violations
from diloco_deploy.chaos.cluster import Course, Deed
from diloco_deploy.chaos.goodput import longest_gaps, work_of
from diloco_deploy.chaos.histories import Histories, Life, split_lives
from diloco_deploy.chaos.plan import Fault, Harm
from diloco_deploy.chaos.result import CHECKS, make_baseline, make_result, summary

EPOCH, LATER = 7, 8
"""Of the two lives of the shard."""


def push(t: float, number: int, since: int, tokens: int, life: int = EPOCH, generation: int = 1) -> dict[str, Any]:
    return {
        "t": t, "what": "pushed", "life": life, "generation": generation, "fragment": 0, "round": number,
        "epoch": EPOCH, "base": number - 1, "tokens": tokens, "steps": 1, "since": since,
    }  # fmt: skip


def accepted(t: float, number: int, tokens: int, generation: int = 1) -> dict[str, Any]:
    return {
        "t": t, "what": "accepted", "learner": "ann", "generation": generation, "fragment": 0, "round": number,
        "epoch": EPOCH, "base": number - 1, "tokens": tokens, "steps": 1,
    }  # fmt: skip


def merging(t: float, version: int, tokens: int, generation: int = 1) -> dict[str, Any]:
    contribution = {
        "learner": "ann", "generation": generation, "round": version, "base": version - 1, "tokens": tokens, "steps": 1,
    }  # fmt: skip
    return {"t": t, "what": "merging", "fragment": 0, "version": version, "contributions": [contribution]}


def announced(t: float, version: int, what: str = "announced") -> dict[str, Any]:
    return {"t": t, "what": what, "fragment": 0, "epoch": EPOCH, "version": version, "checksum": f"{version:08x}"}


def applied(t: float, version: int, merged: int | None) -> dict[str, Any]:
    return {**announced(t, version, "applied"), "merged": merged}


def clean() -> dict[str, list[dict[str, Any]]]:
    """Ann and one shard: two versions, a crash of the shard before the third was announced, and the fourth."""
    return {
        "ann": [
            {"t": 0.0, "what": "born", "role": "worker", "step": 0, "tokens": 0},
            applied(1.0, 0, None),
            push(2.0, 1, since=0, tokens=100),
            applied(2.5, 1, merged=1),
            push(3.0, 2, since=100, tokens=100),
            applied(3.5, 2, merged=2),
            push(4.0, 3, since=200, tokens=100),
            applied(6.0, 3, merged=3),
            push(7.0, 4, since=300, tokens=100, life=LATER),
            applied(7.5, 4, merged=4),
        ],
        "shard-0": [
            {"t": 0.0, "what": "born", "role": "shard", "life": EPOCH},
            {"t": 0.1, "what": "joined", "learner": "ann", "generation": 1},
            announced(0.9, 0),
            accepted(2.1, 1, 100),
            merging(2.2, 1, 100),
            announced(2.3, 1),
            accepted(3.1, 2, 100),
            merging(3.2, 2, 100),
            announced(3.3, 2),
            accepted(4.1, 3, 100),
            merging(4.2, 3, 100),  # killed when it was durable and not announced yet
            {"t": 5.0, "what": "born", "role": "shard", "life": LATER},
            announced(5.5, 3, "restored"),
            {"t": 5.6, "what": "joined", "learner": "ann", "generation": 1},
            accepted(7.1, 4, 100),
            merging(7.2, 4, 100),
            announced(7.3, 4),
        ],
    }


def histories(lines: dict[str, list[dict[str, Any]]]) -> Histories:
    lives = {name: split_lives(name, found) for name, found in lines.items()}
    return Histories({"shard-0": lives["shard-0"]}, {"ann": lives["ann"]})


def find(lines: list[dict[str, Any]], what: str, **facts: Any) -> dict[str, Any]:
    return next(line for line in lines if line["what"] == what and facts.items() <= line.items())


def checks(lines: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [violation.check for violation in violations(histories(lines))]


def test_clean_histories_pass():
    assert violations(histories(clean())) == []


def test_what_was_durable_when_the_shard_was_killed_took_effect():
    assert [(m.version, m.at) for m in histories(clean()).merges()] == [(1, 2.3), (2, 3.3), (3, 5.5), (4, 7.3)]


def test_what_was_not_durable_when_the_shard_was_killed_did_not():
    lines = clean()
    find(lines["shard-0"], "restored").update(version=2, checksum="00000002")
    assert [m.version for m in histories(lines).merges()] == [1, 2, 4]


Plant = Callable[[dict[str, list[dict[str, Any]]]], None]


def merged_twice(lines: dict[str, list[dict[str, Any]]]) -> None:
    """The same work in versions 1 and 2: ann did not know that it was merged."""
    find(lines["ann"], "pushed", round=2).update(since=0)


def half_merged_twice(lines: dict[str, list[dict[str, Any]]]) -> None:
    find(lines["ann"], "pushed", round=2).update(since=50)


def merged_again_after_the_crash(lines: dict[str, list[dict[str, Any]]]) -> None:
    """Version 3 survived with ann's work in it, and she sent it again."""
    find(lines["ann"], "pushed", round=4).update(since=200)


def merged_from_nowhere(lines: dict[str, list[dict[str, Any]]]) -> None:
    lines["ann"].remove(find(lines["ann"], "pushed", round=2))


def never_merged(lines: dict[str, list[dict[str, Any]]]) -> None:
    """Ann takes her work to be in version 2; the round closed without it."""
    find(lines["shard-0"], "merging", version=2)["contributions"] = []
    lines["shard-0"].remove(find(lines["shard-0"], "accepted", round=2))


def rolled_back(lines: dict[str, list[dict[str, Any]]]) -> None:
    """Version 2 was announced, and ann's work in it is gone with it."""
    find(lines["shard-0"], "restored").update(version=1, checksum="00000001")
    lines["shard-0"] = lines["shard-0"][:-3]
    lines["ann"] = [line for line in lines["ann"] if line.get("version") != 3 and line.get("round", 0) < 3][:-1]


def began_anew(lines: dict[str, list[dict[str, Any]]]) -> None:
    """A shard that keeps its versions in memory: learners seed it, as version 0."""
    find(lines["shard-0"], "restored").update(what="announced", version=0, epoch=LATER)
    lines["shard-0"] = lines["shard-0"][:-3]
    lines["ann"] = lines["ann"][:7]


def skipped(lines: dict[str, list[dict[str, Any]]]) -> None:
    find(lines["shard-0"], "announced", version=4).update(version=5)
    find(lines["shard-0"], "merging", version=4).update(version=5)
    find(lines["shard-0"], "accepted", round=4).update(round=5)
    find(lines["ann"], "pushed", round=4).update(round=5)
    find(lines["ann"], "applied", version=4).update(version=5, merged=5)


def applied_what_nobody_announced(lines: dict[str, list[dict[str, Any]]]) -> None:
    lines["ann"].append(applied(9.0, 5, None))


def other_bytes_at_a_learner(lines: dict[str, list[dict[str, Any]]]) -> None:
    find(lines["ann"], "applied", version=2).update(checksum="ffffffff")


def other_bytes_after_the_crash(lines: dict[str, list[dict[str, Any]]]) -> None:
    find(lines["shard-0"], "restored").update(checksum="ffffffff")


def evicted(t: float) -> dict[str, Any]:
    return {"t": t, "what": "gone", "learner": "ann", "generation": 1, "code": "LEASE_EXPIRED"}


def insert(lines: dict[str, list[dict[str, Any]]], line: dict[str, Any]) -> None:
    lines["shard-0"].append(line)
    lines["shard-0"].sort(key=lambda entry: entry["t"])


def merged_after_eviction(lines: dict[str, list[dict[str, Any]]]) -> None:
    insert(lines, evicted(7.15))


def accepted_after_eviction(lines: dict[str, list[dict[str, Any]]]) -> None:
    insert(lines, evicted(7.05))


def accepted_of_an_older_generation(lines: dict[str, list[dict[str, Any]]]) -> None:
    insert(lines, {"t": 7.05, "what": "joined", "learner": "ann", "generation": 2})


def merged_without_being_accepted(lines: dict[str, list[dict[str, Any]]]) -> None:
    lines["shard-0"].remove(find(lines["shard-0"], "accepted", round=2))


def merged_with_other_tokens(lines: dict[str, list[dict[str, Any]]]) -> None:
    find(lines["shard-0"], "accepted", round=2).update(tokens=90)


def forgotten(lines: dict[str, list[dict[str, Any]]]) -> None:
    """Accepted, and its round closed without it."""
    find(lines["shard-0"], "merging", version=2)["contributions"] = []
    find(lines["ann"], "applied", version=2).update(merged=None)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (merged_twice, ["double_counted"]),
        (half_merged_twice, ["double_counted"]),
        (merged_again_after_the_crash, ["double_counted"]),
        (merged_from_nowhere, ["double_counted"]),
        (never_merged, ["work_lost"]),
        (rolled_back, ["work_lost", "lost_versions"]),
        (began_anew, ["lost_versions"]),
        (skipped, ["lost_versions"]),
        (applied_what_nobody_announced, ["lost_versions"]),
        (other_bytes_at_a_learner, ["differing_bytes"]),
        (other_bytes_after_the_crash, ["differing_bytes"]),
        (merged_after_eviction, ["fencing"]),
        (accepted_after_eviction, ["fencing", "fencing"]),
        (accepted_of_an_older_generation, ["fencing"]),
        (merged_without_being_accepted, ["accounting"]),
        (merged_with_other_tokens, ["accounting"]),
        (forgotten, ["accounting"]),
    ],
)
def test_a_planted_violation_is_found_for_what_it_is(plant: Plant, found: list[str]):
    lines = deepcopy(clean())
    plant(lines)
    assert checks(lines) == found


def test_lost_versions_are_counted():
    lines = clean()
    rolled_back(lines)
    (violation,) = (v for v in violations(histories(lines)) if v.check == "lost_versions")
    assert violation.count == 1
    assert str(violation) == ("lost_versions: shard-0 had announced version 2 of fragment 0, and came back with 1")


def test_who_says_goodbye_keeps_what_it_contributed():
    lines = clean()
    insert(lines, {**evicted(7.15), "code": "LEFT"})
    assert checks(lines) == []


def test_work_that_a_dead_process_did_may_be_done_again_by_its_next_life():
    """A worker goes on from its checkpoint: what it then trains is other work, although it counts the same tokens."""
    lines = clean()
    lines["ann"].insert(-2, {"t": 6.5, "what": "born", "role": "worker", "step": 1, "tokens": 100})
    find(lines["ann"], "pushed", round=4).update(since=100)
    assert checks(lines) == []


# ---------------------------------------------------------------- steps and goodput


def stepping(*times: float, born: float = 0.0) -> list[dict[str, Any]]:
    steps = ({"t": t, "what": "stepped", "tokens": 100 * n} for n, t in enumerate(times, 1))
    return [{"t": born, "what": "born", "role": "worker", "tokens": 0}, *steps]


def worker(*lives: list[dict[str, Any]]) -> Histories:
    return Histories({}, {"ann": split_lives("ann", [line for life in lives for line in life])})


def course(*deeds: Deed) -> Course:
    return Course(0.0, 10.0, list(deeds))


@pytest.mark.parametrize(
    ("times", "deeds", "longest"),
    [
        ((1, 2, 3, 6, 7, 9), [], 3.0),
        ((1, 2, 3), [], 7.0),  # it lived to the end and stood still
        ((1, 2, 3), [Deed("kill", "ann", 3.5, 4.0)], 1.0),
        ((1, 2, 8, 9), [Deed("freeze", "ann", 2.5, 7.5)], 1.0),  # frozen is not standing still
        ((1, 2, 8, 9), [Deed("freeze", "ben", 2.5, 7.5)], 6.0),
        ((1, 2, 9), [Deed("freeze", "ann", 2.5, 4.5)], 5.0),
    ],
)
def test_the_longest_gap_is_that_of_a_worker_that_could_have_stepped(times: Any, deeds: list[Deed], longest: float):
    gaps = longest_gaps(worker(stepping(*times)), course(*deeds))
    assert gaps == [(pytest.approx(longest), "ann")]
    assert [violation.check for violation in stood_still(gaps, 2.9)] == (["stood_still"] if longest > 2.9 else [])


@pytest.mark.parametrize(
    ("lives", "deeds", "alive_s"),
    [
        ([stepping(1, 9)], [], 10.0),
        ([stepping(1, 4)], [Deed("kill", "ann", 4.0, 5.0)], 4.0),
        ([stepping(1, 4), stepping(8, born=7.0)], [Deed("kill", "ann", 4.0, 5.0)], 7.0),
        ([stepping(1, 4)], [Deed("freeze", "ann", 4.0, 6.0)], 8.0),
        ([stepping(1, 4)], [Deed("freeze", "ann", 4.0, 6.0), Deed("kill", "ann", 8.0, 9.0)], 6.0),
        ([stepping(1, 4)], [Deed("freeze", "ann", 9.0, 12.0)], 9.0),
    ],
)
def test_a_worker_is_alive_from_when_it_asks_to_join_until_it_is_killed(
    lives: list[list[dict[str, Any]]], deeds: list[Deed], alive_s: float
):
    assert work_of(worker(*lives), course(*deeds)).alive_s == pytest.approx(alive_s)


def clean_with_steps() -> dict[str, list[dict[str, Any]]]:
    """A step of 100 tokens before every push."""
    lines = clean()
    steps = [{"t": t, "what": "stepped", "step": n, "tokens": 100 * n} for n, t in enumerate((1.9, 2.9, 3.9, 6.9), 1)]
    lines["ann"] = sorted([*lines["ann"], *steps], key=lambda line: line["t"])
    return lines


def test_goodput_counts_what_was_trained_in_the_measured_time_and_merged_at_last():
    lines = clean_with_steps()
    work = work_of(histories(lines), Course(2.0, 6.0))
    assert work.tokens == 200, "steps 2 and 3; the version of the latter came after a crash, and would count if later"
    assert work.tokens_accepted == 300

    find(lines["shard-0"], "restored").update(version=2)
    assert work_of(histories(lines), Course(2.0, 6.0)).tokens == 100, "version 3 did not survive"


def test_a_second_without_a_new_version_is_one_without_progress():
    assert work_of(histories(clean()), Course(0.0, 10.0)).progress == pytest.approx(0.4)


KILLED = Deed("kill", "ann", 7.5, 9.5)
AWAY = Deed("freeze", "shard-0", 5.5, 5.8)


@pytest.mark.parametrize(
    ("deeds", "lost"),
    [
        ([], {"joining": 1.0, "never_merged": 2.0, "slower": 3.0}),
        ([KILLED], {"joining": 1.0, "died_unmerged": 2.0, "cut_short": 0.5}),
        ([KILLED, AWAY], {"joining": 1.0, "died_shard_away": 2.0, "cut_short": 0.5}),
        ([KILLED, Deed("cut", "ann to shard-0", 5.5, 9.0)], {"joining": 1.0, "died_shard_away": 2.0, "cut_short": 0.5}),
        ([KILLED, Deed("cut", "ben to shard-0", 5.5, 9.0)], {"joining": 1.0, "died_unmerged": 2.0, "cut_short": 0.5}),
        ([KILLED, Deed("freeze", "shard-0", 0.0, 0.5)], {"joining": 1.0, "died_unmerged": 2.0, "cut_short": 0.5}),
        ([Deed("kill", "ann", 2.5, 9.5)], {"joining": 0.5}),
    ],
)
def test_every_lost_second_has_its_cause(deeds: list[Deed], lost: dict[str, float]):
    """Ann asks to join at 2, takes a step of a second from 3 on, and of four steps two are merged."""
    killed_at = min((deed.began for deed in deeds if deed.harm == "kill"), default=10.0)
    ann = [
        {"t": 2.0, "what": "born", "role": "worker", "tokens": 0},
        *({"t": 3.0 + n, "what": "stepped", "tokens": 100 * n} for n in range(1, 5)),
        push(5.1, 1, since=0, tokens=200),
    ]
    ann = sorted((line for line in ann if line["t"] < killed_at), key=lambda line: line["t"])
    shard = [
        {"t": 0.0, "what": "born", "role": "shard", "life": EPOCH},
        {"t": 0.1, "what": "joined", "learner": "ann", "generation": 1},
        announced(0.9, 0),
        *([accepted(5.1, 1, 200), merging(5.2, 1, 200), announced(5.3, 1)] if killed_at > 5.0 else []),
    ]
    found = histories({"ann": ann, "shard-0": shard})
    work = work_of(found, course(*deeds))

    losses = account(found, course(*deeds), work, {"tokens_per_alive_s": 100.0, "step_s": 1.0})

    assert losses == pytest.approx({**dict.fromkeys(LOSSES, 0.0), **lost})
    assert sum(losses.values()) == pytest.approx(work.alive_s - work.tokens / 100.0), "which is what goodput lacks"


def test_the_result_says_everything_that_the_picture_and_the_table_need():
    calm = make_baseline(histories(clean_with_steps()), Course(0.0, 8.0), {})
    plan = [Fault(4.5, Harm.KILL, "shard-0", 0.5)]
    result = make_result(histories(clean_with_steps()), Course(0.0, 8.0), plan, calm, seed=3, gap_max_s=3.1)
    assert {key: result[key] for key in ("violations", "faults", "goodput_per_alive", "goodput_absolute")} == {
        "violations": 0, "faults": 1, "goodput_per_alive": 1.0, "goodput_absolute": 1.0,
    }  # fmt: skip
    assert result.keys() >= CHECKS.keys()
    assert "no violations" in summary(result)
    assert "1 x kill shard" in summary(result)
    assert all(words in summary(result) for words in LOSSES.values())


def test_without_a_fault_free_run_there_is_no_goodput():
    result = make_result(histories(clean_with_steps()), Course(0.0, 8.0), [], None, seed=3, gap_max_s=3.1)
    assert (result["goodput_per_alive"], result["goodput_absolute"], result["lost_s"]) == (None, None, None)
    assert "no violations" in summary(result)
    assert "goodput" not in summary(result)


def test_every_violation_is_in_the_result():
    lines = clean()
    merged_twice(lines)
    calm = make_baseline(histories(clean_with_steps()), Course(0.0, 8.0), {})
    ended = Course(0.0, 8.0, exits=["ann ended by itself"])
    result = make_result(histories(lines), ended, [], calm, seed=3, gap_max_s=1.0)
    assert (result["violations"], result["double_counted"], result["unplanned"]) == (2, 1, 1)
    assert "2 violations" in summary(result)
    assert "double_counted: 100 tokens of ann are in version 1 of fragment 0 (shard-0)" in summary(result)


def test_lives_are_cut_where_a_process_was_born():
    lives = split_lives("ann", [*stepping(1, 2), *stepping(5, born=4.0)])
    assert [(life.number, life.began, len(life.lines)) for life in lives] == [(0, 0.0, 3), (1, 4.0, 2)]
    assert isinstance(lives[0], Life)
