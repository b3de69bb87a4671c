"""The judge: it is silent on good histories, and each check finds what it is for, however it is planted."""

from __future__ import annotations

from collections.abc import Callable
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
    stepped,
)

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


# ---------------------------------------------------------------- good histories


def test_clean_histories_pass():
    assert violations(histories(clean())) == []


def test_what_was_durable_when_the_shard_was_killed_took_effect():
    assert [(m.version, m.at) for m in histories(clean()).merges()] == [(1, 2.3), (2, 3.3), (3, 5.5), (4, 7.3)]


def test_what_was_not_durable_when_the_shard_was_killed_did_not():
    lines = clean()
    find(lines["shard-0"], "restored").update(version=2, checksum="00000002")
    assert [m.version for m in histories(lines).merges()] == [1, 2, 4]


def goodbye(lines: Lines) -> None:
    """Who says goodbye keeps what it contributed."""
    add(lines, "shard-0", {**evicted(7.15), "code": "LEFT"})


def resumed(lines: Lines) -> None:
    """Ann is killed and goes on from a checkpoint that is older than what she had contributed.

    She trains the same range of her own count again. That is other work.
    """
    lines["ann"] = [line for line in lines["ann"] if line["t"] < 6.5]
    lines["ann"] += [
        {"t": 6.6, "what": "born", "role": "learner", "step": 1, "tokens": 100},
        applied(6.7, 3, None, since=100),
        stepped(6.9, 2),
        push(7.0, 4, since=100, tokens=100, epoch=LATER),
        applied(7.5, 4, merged=4, since=200, epoch=LATER),
    ]


def sent_again_under_a_new_lease(lines: Lines) -> None:
    """Ann is evicted before her contribution is accepted, and sends it again."""
    add(lines, "shard-0", evicted(1.0))
    add(lines, "shard-0", {"t": 1.5, "what": "joined", "learner": "ann", "generation": 2})
    add(lines, "ann", push(2.05, 1, since=0, tokens=100, generation=2))
    for number in (1, 2, 3):
        find(lines["shard-0"], "accepted", round=number).update(generation=2)
        find(lines["shard-0"], "merging", version=number)["contributions"][0].update(generation=2)
        if number > 1:
            find(lines["ann"], "pushed", round=number).update(generation=2)


def late(lines: Lines) -> None:
    """Round 2 closed without ann: her work is in round 3."""
    lines["shard-0"].remove(find(lines["shard-0"], "accepted", round=2))
    find(lines["shard-0"], "merging", version=2)["contributions"] = []
    add(lines, "ann", carried(3.4, 2, 100))
    find(lines["ann"], "applied", version=2).update(merged=None, since=100)
    sent(lines, 3, since=100, tokens=200)


def forgotten(lines: Lines) -> None:
    """Round 2 closed without ann, and the shard no longer knows: she counts it as merged."""
    late(lines)
    lines["ann"].remove(find(lines["ann"], "carried"))
    find(lines["ann"], "applied", version=2).update(forgotten=2, since=200)
    sent(lines, 3, since=200, tokens=100)


def renamed(lines: Lines) -> None:
    """Version 3 gets a name of the later epoch when the shard begins."""
    find(lines["shard-0"], "restored").update(epoch=LATER)
    find(lines["ann"], "applied", version=3).update(epoch=LATER)


def pointed_away(lines: Lines) -> None:
    """Round 2 left ann's work out, and she applies its version as if it held it."""
    line = find(lines["shard-0"], "merging", version=2)
    line.update(contributions=[], left_out=line["contributions"])
    recount(lines)


@pytest.mark.parametrize(
    "change", [goodbye, resumed, sent_again_under_a_new_lease, late, forgotten, renamed, pointed_away]
)
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


def test_learners_that_do_not_carry_leave_gaps():
    lines = clean()
    sent(lines, 2, since=150, tokens=50)
    assert checks(lines) == ["work_lost"]
    assert checks(lines, gapless=False) == []


# ---------------------------------------------------------------- planted violations


def merged_twice(lines: Lines) -> None:
    """The same work in versions 1 and 2: ann did not know that it was merged."""
    add(lines, "ann", carried(2.4, 1, 100))
    find(lines["ann"], "applied", version=1).update(merged=None, since=0)
    sent(lines, 2, since=0, tokens=200)


def half_merged_twice(lines: Lines) -> None:
    sent(lines, 2, since=50, tokens=150)


def merged_again_after_the_crash(lines: Lines) -> None:
    """Version 3 survived with ann's work in it, and she sent it again."""
    sent(lines, 4, since=200, tokens=200)


def merged_from_nowhere(lines: Lines) -> None:
    lines["ann"].remove(find(lines["ann"], "pushed", round=2))
    cut(lines, 3.4)


def carried_although_it_was_merged(lines: Lines) -> None:
    """What she was told was wrong."""
    cut(lines, 3.5)
    add(lines, "ann", carried(3.4, 2, 100))


def counted_as_unmerged(lines: Lines) -> None:
    """Ann applies a version that holds her work, and does not know."""
    cut(lines, 3.8)
    find(lines["ann"], "applied", version=2).update(merged=None, since=100)


def never_merged(lines: Lines) -> None:
    """Ann takes her work to be in version 2; the round closed without it."""
    find(lines["shard-0"], "merging", version=2)["contributions"] = []
    lines["shard-0"].remove(find(lines["shard-0"], "accepted", round=2))
    recount(lines)


def left_out(lines: Lines) -> None:
    """Tokens 100 to 120 were trained, and are in no contribution."""
    sent(lines, 2, since=120, tokens=80)


def left_out_and_sent_again(lines: Lines) -> None:
    pointed_away(lines)
    add(lines, "ann", carried(3.4, 2, 100))
    find(lines["ann"], "applied", version=2).update(merged=None, since=100)
    sent(lines, 3, since=100, tokens=200)


def left_out_without_being_accepted(lines: Lines) -> None:
    pointed_away(lines)
    lines["shard-0"].remove(find(lines["shard-0"], "accepted", round=2))


def skipped(lines: Lines) -> None:
    find(lines["shard-0"], "announced", version=4).update(version=5)
    find(lines["shard-0"], "merging", version=4).update(version=5)
    find(lines["shard-0"], "accepted", round=4).update(round=5)
    find(lines["ann"], "pushed", round=4).update(round=5)
    find(lines["ann"], "applied", version=4).update(version=5, merged=5, checksum="00000004")


def came_back_with_another_one(lines: Lines) -> None:
    """Another version 3 than the one that was announced, made in an epoch that nobody knows."""
    find(lines["shard-0"], "merging", version=3).update(t=4.2)
    add(lines, "shard-0", announced(4.3, 3))
    find(lines["shard-0"], "restored").update(stored_epoch=5, epoch=LATER)
    find(lines["ann"], "applied", version=3).update(epoch=LATER, merged=None, since=200)
    cut(lines, 6.5)


def applied_what_nobody_announced(lines: Lines) -> None:
    lines["ann"].append(applied(9.0, 5, None, since=400, epoch=LATER))


def other_bytes_at_a_learner(lines: Lines) -> None:
    find(lines["ann"], "applied", version=2).update(checksum="ffffffff")


def other_bytes_after_the_crash(lines: Lines) -> None:
    find(lines["shard-0"], "restored").update(checksum="ffffffff")


def other_state_after_the_crash(lines: Lines) -> None:
    """What learners get is the same; the outer optimizer has lost its momentum."""
    add(lines, "shard-0", announced(4.3, 3))
    find(lines["shard-0"], "restored").update(state="ffffffff")


def named_for_another_epoch(lines: Lines) -> None:
    find(lines["shard-0"], "announced", version=4).update(epoch=EPOCH)
    cut(lines, 7.4)


def the_same_epoch_twice(lines: Lines) -> None:
    find(lines["shard-0"], "born", epoch=LATER).update(epoch=EPOCH)
    cut(lines, 5.7)


def evicted(t: float) -> dict[str, Any]:
    return {"t": t, "what": "gone", "learner": "ann", "generation": 1, "code": "LEASE_EXPIRED"}


def merged_after_eviction(lines: Lines) -> None:
    add(lines, "shard-0", evicted(7.15))


def accepted_after_eviction(lines: Lines) -> None:
    add(lines, "shard-0", evicted(7.05))


def accepted_of_an_older_generation(lines: Lines) -> None:
    add(lines, "shard-0", {"t": 7.05, "what": "joined", "learner": "ann", "generation": 2})


def merged_without_being_accepted(lines: Lines) -> None:
    lines["shard-0"].remove(find(lines["shard-0"], "accepted", round=2))


def merged_with_other_tokens(lines: Lines) -> None:
    find(lines["shard-0"], "accepted", round=2).update(tokens=90)


def dropped(lines: Lines) -> None:
    """Accepted, and its round closed without it."""
    late(lines)
    add(lines, "shard-0", accepted(3.1, 2, 100))


def tokens_not_counted(lines: Lines) -> None:
    find(lines["shard-0"], "announced", version=4).update(tokens_merged=390)


def two_under_way(lines: Lines) -> None:
    """Ann contributes anew before she knows what became of the last one."""
    cut(lines, 3.2)
    add(lines, "ann", push(3.1, 3, since=200, tokens=0))


def never_trained(lines: Lines) -> None:
    lines["ann"].remove(find(lines["ann"], "stepped", step=4))


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (merged_twice, ["double_counted"] * 3),  # in the model, in what she carried, in what she counts
        (half_merged_twice, ["double_counted"]),
        (merged_again_after_the_crash, ["double_counted"]),
        (merged_from_nowhere, ["double_counted"]),
        (carried_although_it_was_merged, ["double_counted"]),
        (counted_as_unmerged, ["double_counted"]),
        (never_merged, ["work_lost"]),
        (left_out, ["work_lost"]),
        (left_out_and_sent_again, ["double_counted"]),
        (rolled_back, ["work_lost", "lost_versions"]),
        (began_anew, ["work_lost", "work_lost", "lost_versions"]),
        (skipped, ["lost_versions"]),
        (came_back_with_another_one, ["work_lost", "work_lost", "lost_versions"]),
        (applied_what_nobody_announced, ["lost_versions"]),
        (other_bytes_at_a_learner, ["differing_bytes"]),
        (other_bytes_after_the_crash, ["differing_bytes"]),
        (other_state_after_the_crash, ["differing_bytes"]),
        (named_for_another_epoch, ["differing_bytes"]),
        (the_same_epoch_twice, ["differing_bytes"]),
        (merged_after_eviction, ["fencing"]),
        (accepted_after_eviction, ["fencing", "fencing"]),
        (accepted_of_an_older_generation, ["fencing"]),
        (merged_without_being_accepted, ["accounting"]),
        (merged_with_other_tokens, ["accounting"]),
        (left_out_without_being_accepted, ["accounting"]),
        (dropped, ["accounting"]),
        (tokens_not_counted, ["accounting"]),
        (two_under_way, ["accounting"]),
        (never_trained, ["accounting"]),
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


# ---------------------------------------------------------------- learners that lie


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
