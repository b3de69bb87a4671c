"""The judge: it is silent on good histories, each check finds what it is for, and torn histories are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded import (
    EPOCH,
    LATER,
    Lines,
    accepted,
    announced,
    applied,
    carried,
    clean,
    find,
    histories,
    merging,
    push,
    recount,
    restored,
    sent,
)

from diloco_common.observe.history import HistoryFile
from diloco_simulator.verify.histories import read_history
from diloco_simulator.verify.judge import violations

Plant = Callable[[Lines], None]
EXCUSED = {(LATER, 0)}


def checks(lines: Lines, **how: Any) -> list[str]:
    return [violation.check for violation in violations(histories(lines), **how)]


def cut(lines: Lines, t: float) -> None:
    """Everything ends at this time."""
    for name in lines:
        lines[name] = [line for line in lines[name] if line["t"] < t]


def add(lines: Lines, name: str, line: dict[str, Any]) -> None:
    lines[name] = sorted([*lines[name], line], key=lambda entry: entry["t"])


def test_clean_histories_pass():
    assert violations(histories(clean())) == []


def test_what_was_durable_when_the_shard_was_killed_took_effect():
    assert [m.version for m in histories(clean()).merges()] == [1, 2, 3, 4]


def test_what_was_not_durable_when_the_shard_was_killed_did_not():
    lines = clean()
    find(lines["shard-0"], "restored").update(version=2, checksum="00000002")
    assert [m.version for m in histories(lines).merges()] == [1, 2, 4]


def late(lines: Lines) -> None:
    """Round 2 closed without ann: her work is in round 3."""
    lines["shard-0"].remove(find(lines["shard-0"], "accepted", round=2))
    find(lines["shard-0"], "merging", version=2)["contributions"] = []
    add(lines, "ann", carried(3.4, 2, 100))
    find(lines["ann"], "applied", version=2).update(merged=None, since=100)
    sent(lines, 3, since=100, tokens=200)


def pointed_away(lines: Lines) -> None:
    """Round 2 left ann's work out, and she applies its version as if it held it."""
    line = find(lines["shard-0"], "merging", version=2)
    line.update(contributions=[], left_out=line["contributions"])
    recount(lines)


@pytest.mark.parametrize("change", [late, pointed_away])
def test_what_is_allowed_is_not_reported(change: Plant):
    lines = clean()
    change(lines)
    assert violations(histories(lines)) == []


def rolled_back(lines: Lines) -> None:
    """The shard came back with version 1. Version 2 was announced, and ann's work in it is gone with it."""
    cut(lines, 5.5)
    lines["shard-0"].append(restored(5.5, 1, epoch=LATER))
    lines["ann"].append(carried(5.7, 3, 100))
    lines["ann"].append(applied(5.8, 1, None, since=200, epoch=LATER))


def went_on_after_it_was_rolled_back(lines: Lines) -> None:
    """Another version 2 holds what was pending then."""
    rolled_back(lines)
    lines["shard-0"] += [
        {"t": 5.6, "what": "joined", "learner": "ann", "generation": 1},
        accepted(7.1, 2, 100),
        merging(7.2, 2, 100),
        {**announced(7.3, 2, LATER), "state": "12121212", "checksum": "12121212"},
    ]
    lines["ann"] += [
        push(7.0, 2, since=200, tokens=100, epoch=LATER),
        {**applied(7.4, 2, merged=2, since=300, epoch=LATER), "checksum": "12121212"},
    ]


def began_anew(lines: Lines) -> None:
    """A shard that keeps its versions in memory: learners seed it, as version 0."""
    cut(lines, 5.5)
    lines["shard-0"].append(announced(5.5, 0, LATER))


@pytest.mark.parametrize("change", [rolled_back, went_on_after_it_was_rolled_back, began_anew])
def test_an_excused_loss_takes_versions_and_what_only_they_held(change: Plant):
    lines = clean()
    change(lines)
    assert checks(lines, excused=EXCUSED) == []
    assert checks(lines, excused={(LATER, 1), (EPOCH, 0)})[-1] == "lost_versions"


def merged_twice(lines: Lines) -> None:
    """The same work in versions 1 and 2: ann did not know that it was merged."""
    add(lines, "ann", carried(2.4, 1, 100))
    find(lines["ann"], "applied", version=1).update(merged=None, since=0)
    sent(lines, 2, since=0, tokens=200)


def half_merged_twice(lines: Lines) -> None:
    sent(lines, 2, since=50, tokens=150)


def never_merged(lines: Lines) -> None:
    """Ann takes her work to be in version 2; the round closed without it."""
    find(lines["shard-0"], "merging", version=2)["contributions"] = []
    lines["shard-0"].remove(find(lines["shard-0"], "accepted", round=2))
    recount(lines)


def left_out_and_sent_again(lines: Lines) -> None:
    pointed_away(lines)
    add(lines, "ann", carried(3.4, 2, 100))
    find(lines["ann"], "applied", version=2).update(merged=None, since=100)
    sent(lines, 3, since=100, tokens=200)


def left_out_without_being_accepted(lines: Lines) -> None:
    pointed_away(lines)
    lines["shard-0"].remove(find(lines["shard-0"], "accepted", round=2))


def came_back_with_another_one(lines: Lines) -> None:
    """Another version 3 than the one that was announced, made in an epoch that nobody knows."""
    find(lines["shard-0"], "merging", version=3).update(t=4.2)
    add(lines, "shard-0", announced(4.3, 3))
    find(lines["shard-0"], "restored").update(stored_epoch=5, epoch=LATER)
    find(lines["ann"], "applied", version=3).update(epoch=LATER, merged=None, since=200)
    cut(lines, 6.5)


def other_bytes_at_a_learner(lines: Lines) -> None:
    find(lines["ann"], "applied", version=2).update(checksum="ffffffff")


def evicted(t: float) -> dict[str, Any]:
    return {"t": t, "what": "gone", "learner": "ann", "generation": 1, "code": "LEASE_EXPIRED"}


def merged_after_eviction(lines: Lines) -> None:
    add(lines, "shard-0", evicted(7.15))


def merged_without_being_accepted(lines: Lines) -> None:
    lines["shard-0"].remove(find(lines["shard-0"], "accepted", round=2))


def dropped(lines: Lines) -> None:
    """Accepted, and its round closed without it."""
    late(lines)
    add(lines, "shard-0", accepted(3.1, 2, 100))


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (merged_twice, ["double_counted"] * 3),  # in the model, in what she carried, in what she counts
        (half_merged_twice, ["double_counted"]),
        (never_merged, ["work_lost"]),
        (left_out_and_sent_again, ["double_counted"]),
        (rolled_back, ["work_lost", "lost_versions"]),
        (began_anew, ["work_lost", "work_lost", "lost_versions"]),
        (came_back_with_another_one, ["work_lost", "work_lost", "lost_versions"]),
        (other_bytes_at_a_learner, ["differing_bytes"]),
        (merged_after_eviction, ["fencing"]),
        (merged_without_being_accepted, ["accounting"]),
        (left_out_without_being_accepted, ["accounting"]),
        (dropped, ["accounting"]),
    ],
)
def test_a_planted_violation_is_found_for_what_it_is(plant: Plant, found: list[str]):
    lines = clean()
    plant(lines)
    assert checks(lines) == found


def test_nothing_excuses_a_version_that_was_never_made():
    lines = clean()
    came_back_with_another_one(lines)
    assert checks(lines, excused=EXCUSED) == ["lost_versions"]


def claim(lines: Lines) -> None:
    """A shard has merged what mallory says that it trained. Nobody has a history of mallory."""
    add(lines, "shard-0", {**accepted(2.05, 1, 77), "learner": "mallory", "generation": 9})
    merge = find(lines["shard-0"], "merging")
    merge["contributions"] = [*merge["contributions"], {**merge["contributions"][0], "learner": "mallory"}]
    merge["contributions"][-1] |= {"generation": 9, "tokens": 77}


def lied_to(lines: Lines) -> None:
    claim(lines)
    half_merged_twice(lines)


@pytest.mark.parametrize(
    ("change", "claimants", "is_owed"),
    [
        (claim, set(), True),  # a contribution that nobody sent
        (claim, {"mallory"}, False),  # what a liar says is a claim and no work
        (half_merged_twice, {"ann"}, False),  # nothing is promised to who has a liar under its id
        (lied_to, {"mallory"}, True),  # shards owe the others what they always owe
    ],
)
def test_nothing_is_promised_to_a_learner_under_whose_id_somebody_lies(
    change: Plant, claimants: set[str], is_owed: bool
):
    lines = clean()
    change(lines)
    assert ("double_counted" in checks(lines, claimants=claimants)) == is_owed


def ticking():
    times = iter(range(100))
    return lambda: float(next(times))


def test_processes_of_one_name_follow_each_other(tmp_path: Path) -> None:
    first = HistoryFile(tmp_path / "history", "ann", ticking())
    first.write("born", role="learner")
    first.write("stepped", step=1)
    HistoryFile(tmp_path / "history", "ann", ticking()).write("born", role="learner")

    lines = read_history(tmp_path / "history" / "ann.jsonl")
    assert [line["what"] for line in lines] == ["born", "stepped", "born"]
    assert lines[1] == {"t": 1.0, "what": "stepped", "step": 1}


def test_a_torn_line_costs_nothing_but_itself(tmp_path: Path) -> None:
    HistoryFile(tmp_path, "ann", ticking()).write("stepped", step=1)
    path = tmp_path / "ann.jsonl"
    with path.open("ab") as file:
        file.write(b'{"t":1.0,"what":"stepp')

    HistoryFile(tmp_path, "ann", ticking()).write("born")

    assert [line["what"] for line in read_history(path)] == ["stepped", "born"]
