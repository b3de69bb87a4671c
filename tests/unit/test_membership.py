"""Leases and generations: who is alive, stalled, evicted, gone, or somebody else."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from builders import make_settings
from diloco_common.errors import Busy, NotJoined, StaleGeneration, Superseded
from diloco_common.wire.messages import Progress
from diloco_server.core.membership import ALIKE, LeaseState, Likeness, Member, Membership


def make_membership(max_learners: int = 8, **lease: float) -> Membership:
    defaults = {"lease_s": 6.0, "heartbeat_s": 1.0}
    return Membership(make_settings(lease=defaults | lease).lease, max_learners)


def heard(members: Membership, member: Member, step: int, now: float) -> None:
    members.heard(member, Progress(step, 10 * step), now)


@pytest.fixture
def members() -> Membership:
    return make_membership()


@pytest.mark.parametrize(
    ("learner_id", "generation", "error"),
    [
        ("nobody", 1, NotJoined),
        ("a", 2, StaleGeneration),
        ("a", 4, NotJoined),
        ("b", 4, StaleGeneration),
        ("b", 1, Superseded),  # whatever the newer process does later
    ],
)
def test_who_speaks_without_a_current_lease_is_refused(members, learner_id, generation, error) -> None:
    members.join("b", "one process", 0.0)  # 1
    members.join("a", "p", 0.0)  # 2
    members.join("a", "p", 0.0)  # 3
    members.join("b", "another process", 0.0)  # 4
    members.join("b", "another process", 0.0)  # 5
    with pytest.raises(error):
        members.check(learner_id, generation)
    assert members.check("a", 3).learner_id == "a"
    assert members.check("b", 5).process_id == "another process"


def test_the_record_of_a_learner_goes_on_over_its_generations_but_its_cadence_does_not(members: Membership) -> None:
    first = members.join("a", "p", 0.0)
    heard(members, first, 7, 0.0)
    first.asked, first.contributed, first.merged, first.tokens_merged = 4, 3, 2, 20
    first.missed["ABSENT"] += 1
    again = members.join("a", "p", 1.0)
    assert (again.asked, again.contributed, again.merged, again.tokens_merged) == (4, 3, 2, 20)
    assert again.missed == {"ABSENT": 1}
    assert again.first_step is None
    assert again.state is LeaseState.ALIVE


def come(members: Membership, process_id: str, now: float, age_s: float = 0.0) -> Member:
    """A process joins as cat, if it may."""
    members.welcome("cat", process_id, now - age_s)
    return members.join("cat", process_id, now, age_s=age_s)


@pytest.mark.parametrize(
    ("first_age_s", "second_age_s", "later_s", "has_it"),
    [
        (0.0, 0.0, 2.0, True),  # neither says
        (50.0, 3.0, 1.0, True),
        (3.0, 50.0, 1.0, False),  # it was frozen, or cut off, when the other one took over at the other shards
        (3.0, 7.5, 3.0, False),
        (3.0, 50.0, 1000.0, True),  # whose lease is over by then
    ],
)
def test_of_two_with_one_id_the_one_that_began_later_has_it(members, first_age_s, second_age_s, later_s, has_it):
    come(members, "process 2", 0.0, first_age_s)  # whatever their ids
    members.expire(later_s)
    with nullcontext() if has_it else pytest.raises(Superseded):
        come(members, "process 1", later_s, second_age_s)


@pytest.mark.parametrize("took_s", [(0.0, 0.0), (0.9, 0.0), (0.0, 0.9)])
@pytest.mark.parametrize("first", [0, 1])
def test_of_two_that_began_together_all_shards_have_the_same_one(members, first, took_s) -> None:
    """Whichever came first, and however long their Joins took: else each may hold one shard of two, for ever."""
    come(members, f"process {first}", 2.0, age_s=2.0 - took_s[first])
    with nullcontext() if first == 0 else pytest.raises(Superseded):
        come(members, f"process {1 - first}", 2.0, age_s=2.0 - took_s[1 - first])


@pytest.mark.parametrize(
    ("joins", "last", "has_it"),
    [
        ([(2, 7.0, 0.0), (2, 8.0, 8.0)], (1, 9.0, 3.0), True),
        ([(2, 1.0, 1.0), (2, 7.0, 0.0)], (1, 9.0, 3.0), True),
        ([(1, 1.0, 1.0), (2, 4.0, 1.0)], (1, 9.0, 2.0), False),
    ],
)
def test_a_join_that_was_on_its_way_for_long_makes_no_process_younger(members, joins, last, has_it) -> None:
    for number, now, age_s in joins:
        come(members, f"process {number}", now, age_s)
    with nullcontext() if has_it else pytest.raises(Superseded):
        come(members, f"process {last[0]}", *last[1:])


# Joined at 0, heard at the given times with the given inner steps; the lease is 6 s.
@pytest.mark.parametrize(
    ("heard_at", "now", "state", "code"),
    [
        ({}, 6.0, LeaseState.ALIVE, ""),
        ({}, 6.1, LeaseState.EVICTED, "LEASE_EXPIRED"),
        ({5.0: 1, 10.0: 1}, 11.1, LeaseState.ALIVE, ""),  # a heartbeat without progress renews as well
        ({5.0 * i: 1 for i in range(1, 8)}, 35.1, LeaseState.STALLED, ""),  # 30 s after its last step
        ({5.0 * i: 1 for i in range(1, 200)}, 1000.0, LeaseState.STALLED, ""),  # and whatever it does after that
        ({5.0 * i: i for i in range(1, 20)}, 95.0, LeaseState.ALIVE, ""),
    ],
)
def test_silence_ends_a_lease_and_no_progress_never_does(heard_at, now, state, code) -> None:
    members = make_membership()
    member = members.join("a", "p", 0.0)
    for at, step in heard_at.items():
        assert members.expire(at) == []
        heard(members, member, step, at)
    gone = members.expire(now)
    assert (member.state, member.evicted_for) == (state, code)
    assert gone == ([member] if state is LeaseState.EVICTED else [])
    assert member.live is (state is not LeaseState.EVICTED)
    assert members.expire(now) == [], "evicted once"


def test_a_stalled_learner_is_alive_again_with_its_next_step(members: Membership) -> None:
    member = members.join("a", "p", 0.0)
    for second in range(40):
        heard(members, member, 1, float(second))
        members.expire(float(second))
    assert member.state is LeaseState.STALLED
    assert members.check("a", 1) is member, "it keeps its lease"
    heard(members, member, 2, 40.0)
    members.expire(40.0)
    assert member.state is LeaseState.ALIVE


def test_as_many_leases_are_held_as_the_settings_allow() -> None:
    members = make_membership(max_learners=2)
    a = members.join("a", "p", 0.0)
    members.join("b", "p", 0.0)
    with pytest.raises(Busy, match=r"2 learners hold a lease already \(shard\.max_learners\)"):
        members.join("c", "p", 0.0)
    members.join("a", "p", 0.0)  # its own lease
    members.leave(a)  # of an older generation: nobody's lease any more
    current = members.get("a")
    assert current is not None
    members.leave(current)
    members.join("c", "p", 0.0)
    assert [m.learner_id for m in members.live()] == ["b", "c"]


def test_every_live_learner_has_the_smallest_number_that_is_free(members: Membership) -> None:
    assert [members.join(learner_id, "p", 0.0).index for learner_id in ("c", "a", "b")] == [0, 1, 2]
    members.leave(members.all()[0])  # a
    assert members.join("d", "p", 0.0).index == 1


def test_a_learner_keeps_its_number_over_restarts_of_itself_and_of_the_shard(members: Membership) -> None:
    for learner_id in ("a", "b"):
        members.join(learner_id, "p", 0.0)
    assert members.join("b", "another process", 1.0).index == 1

    restarted = make_membership()
    assert restarted.join("b", "p", 0.0, 1).index == 1
    assert restarted.join("a", "p", 0.0, 0).index == 0
    assert restarted.join("c", "p", 0.0, 1).index == 2  # b has it


LOSSES = [3.0 - 0.1 * i for i in range(2 * ALIKE)]


@pytest.mark.parametrize(
    ("learner_id", "losses", "first_step", "alike"),
    [
        ("b", LOSSES, 1, [None] * (ALIKE - 1) + ["a"] + [None] * ALIKE),  # said once
        ("b", [loss + 0.01 for loss in LOSSES], 1, [None] * 2 * ALIKE),  # batches of its own
        ("b", LOSSES, 2, [None] * 2 * ALIKE),  # at other steps
        ("a", LOSSES, 1, [None] * 2 * ALIKE),  # itself
    ],
)
def test_learners_that_draw_the_same_batches_are_noticed_by_their_losses(
    learner_id: str, losses: list[float], first_step: int, alike: list[str | None]
) -> None:
    likeness = Likeness()
    for step, loss in enumerate(LOSSES, 1):
        assert likeness.heard("a", Progress(step, 10 * step, loss)) is None
    reports = [Progress(step, 10 * step, loss) for step, loss in enumerate(losses, first_step)]
    assert [likeness.heard(learner_id, report) for report in reports] == alike
