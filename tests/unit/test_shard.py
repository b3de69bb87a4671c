"""The shard's state machine: seeding, rounds, versions, guards, fencing, budget, and honest accounting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from builders import asking
from diloco_common.codec import Payload, encode_payload
from diloco_common.errors import (
    BadChecksum,
    Draining,
    LeaseExpired,
    ManifestMismatch,
    NotJoined,
    NotSeeded,
    StaleGeneration,
    Superseded,
    UnknownFragment,
)
from diloco_common.wire.manifest import TensorSpec, companion_of, model_digest
from diloco_common.wire.messages import Collect, Committed, Drain, Evicted, Outcome, Pulse, PushHeader, Stop
from diloco_server.core.fragment import DECLINED_MAX
from diloco_server.core.ledger import (
    BudgetReached,
    LearnerForgotten,
    LearnerGone,
    Merged,
    QuorumReached,
    RoundClosed,
    RoundOpened,
    VersionCommitted,
)
from diloco_server.core.membership import Member
from rig import EPOCH, MODEL, SIZE, TOKENS, Rig

ACCEPTED, DUPLICATE, LATE, REJECTED = Outcome.ACCEPTED, Outcome.DUPLICATE, Outcome.LATE, Outcome.REJECTED


@pytest.fixture
def rig() -> Rig:
    """Round 1 is open, and waits for both."""
    return Rig().started("a", "b")


def let_in(rig: Rig, learner_id: str = "a") -> tuple[Member, PushHeader, Payload]:
    """A copy of a contribution to round 1, which was let in by its header."""
    payload = encode_payload(torch.ones(SIZE), "float32")
    copy = rig.members[learner_id], rig.header(1, payload), payload
    assert rig.shard.taking.admit(*copy[:2], rig.now) is None
    return copy


DAMAGED = BadChecksum("the bytes of this copy are damaged")


def test_the_first_values_become_version_0_and_everybody_is_told() -> None:
    rig = Rig().joined("a", "b")
    rig.take_told("a")
    assert not rig.shard.versions.all_seeded
    assert rig.seed("b", 3.0).outcome is ACCEPTED
    assert rig.theta == [3.0]
    assert rig.shard.versions.all_seeded
    for learner_id in "ab":
        assert rig.told_of(learner_id, Committed) == [Committed(0, 0, EPOCH)]


def test_the_first_writer_wins() -> None:
    rig = Rig().joined("a", "b")
    rig.holds_jobs = True
    assert rig.seed("a", 1.0).outcome is ACCEPTED
    assert rig.seed("b", 2.0).outcome is DUPLICATE, "while version 0 is computed"
    rig.finish_jobs()
    assert rig.seed("b", 2.0).outcome is DUPLICATE, "and once it is there"
    assert rig.theta == [1.0]


def test_a_seed_that_could_not_be_used_leaves_room_for_another() -> None:
    rig = Rig().joined("a", "b")
    rig.holds_jobs = True
    rig.seed("a", 1.0, tokens_merged=12345)
    rig.jobs.clear()
    rig.shard.fragments[0].fail_seed()
    assert rig.shard.tokens_merged == 0, "nothing was merged into what is not there"
    rig.holds_jobs = False
    assert rig.seed("b", 2.0).outcome is ACCEPTED
    assert rig.theta == [2.0]


def test_before_version_0_nothing_can_be_pulled_or_pushed() -> None:
    rig = Rig()
    with pytest.raises(NotSeeded, match="no learner has joined yet"):
        rig.shard.observe(MODEL)
    rig.join("a")
    with pytest.raises(NotSeeded, match="fragment 0 has no version yet"):
        rig.shard.published(0)
    assert rig.contribute("a", 1).code == "NOT_SEEDED"
    with pytest.raises(UnknownFragment, match="shard 0 owns fragments 0, not 5"):
        rig.shard.published(5)


OTHER_MODEL = [TensorSpec("w", (SIZE + 1,)), TensorSpec("x", (2,))]


@pytest.mark.parametrize(
    ("seeded", "gone", "replaced"),
    [(False, False, False), (False, True, True), (True, True, False)],
    ids=["somebody-is-there", "nobody-is-there", "seeded"],
)
def test_the_model_is_replaced_only_while_nothing_is_seeded_and_nobody_is_there(seeded, gone, replaced) -> None:
    rig = Rig().joined("a")
    if seeded:
        rig.seed("a")
    if gone:
        rig.shard.leave(rig.members["a"])
    if replaced:
        rig.shard.join("b", asking(OTHER_MODEL), 0.0)
        assert rig.state.fragment.num_elements == SIZE + 3
    else:
        with pytest.raises(ManifestMismatch):
            rig.shard.join("b", asking(OTHER_MODEL), 0.0)
        assert rig.state.fragment.num_elements == SIZE


def test_a_shard_that_was_told_the_model_takes_no_other() -> None:
    """Also from the first learner, whoever that is."""
    rig = Rig(run={"model": model_digest(MODEL)})
    with pytest.raises(ManifestMismatch) as refused:
        rig.shard.join("mallory", asking(OTHER_MODEL), 0.0)
    for words in (model_digest(MODEL), model_digest(OTHER_MODEL), "run.model"):
        assert words in str(refused.value)
    assert rig.shard.manifest is None
    rig.join("a")
    assert rig.seed("a").outcome is ACCEPTED


def test_a_shard_that_was_told_the_model_takes_no_companions_beyond_it() -> None:
    """And whoever wants them hears the digest that has them."""
    companion = companion_of(MODEL[0], "Adam")
    rig = Rig(run={"model": model_digest(MODEL)})
    wanted = model_digest([*MODEL, companion])
    with pytest.raises(ManifestMismatch, match=rf"without the momentum.*run\.model={wanted}.*diloco-worker digest"):
        rig.shard.join("mallory", asking([*MODEL, companion]), 0.0)
    assert rig.shard.manifest is None
    told = Rig(run={"model": wanted})
    with pytest.raises(ManifestMismatch, match="average the momentum of the same kind"):
        told.shard.join("a", asking(MODEL), 0.0)
    told.shard.join("b", asking([*MODEL, companion]), 0.0)


def test_a_round_asks_every_learner_collects_merges_and_is_announced(rig: Rig) -> None:
    assert rig.noted(RoundOpened) == [RoundOpened(0, 1, 2)]
    for learner_id in "ab":
        assert rig.told_of(learner_id, Collect) == [Collect(0, 1, EPOCH)]
    rig.now = 2.0
    assert rig.contribute("a", 1, 1.0).outcome is ACCEPTED
    assert rig.state.version == 0
    rig.now = 3.0
    assert rig.contribute("b", 1, 3.0).outcome is ACCEPTED
    assert (rig.state.version, rig.theta) == (1, [-2.0])
    assert rig.noted(QuorumReached) == [QuorumReached(0, 1, 3.0)]
    assert rig.noted(RoundClosed) == [RoundClosed(0, 1, "all", 2, 2, 0, 3.0)]
    whose = (Merged("a", 4 * TOKENS, 0.5, 1.0), Merged("b", 4 * TOKENS, 0.5, 1.0))
    assert rig.noted(VersionCommitted) == [VersionCommitted(0, 1, 2, 8 * TOKENS, 3.0, whose)]
    assert rig.told_of("a", Committed) == [Committed(0, 1, EPOCH)]
    assert rig.told_of("b", Committed) == [Committed(0, 1, EPOCH)]
    ledger = rig.shard.ledger
    assert (ledger.rounds, ledger.participants, ledger.participants_mean) == (1, 2, 2.0)
    assert rig.shard.tokens_merged == ledger.tokens_merged == 80
    rig.assert_accounts_balance()


def test_a_learner_that_claims_any_number_of_steps_stops_no_decision() -> None:
    rig = Rig(sync={"quorum": 1}).started("a", "b")
    rig.contribute("a", 1)
    rig.steps["liar"] = 2**64 - 1
    rig.join("liar")
    rig.contribute("b", 1)
    rig.step("a", "b", steps=4)
    rig.step("liar")
    assert rig.state.round is not None


def test_h_counts_from_the_opening_of_the_last_round_not_from_its_close() -> None:
    rig = Rig().started("a")
    rig.step("a", steps=3)
    rig.contribute("a", 1)
    assert rig.state.round is None
    rig.step("a")
    assert rig.state.round is not None


def test_who_joins_while_a_round_is_open_is_not_asked_for_it() -> None:
    rig = Rig().started("a").joined("late")
    assert rig.told_of("late", Collect) == []
    answer = rig.contribute("late", 1)
    assert (answer.outcome, answer.code) == (REJECTED, "WRONG_ROUND")
    assert "did not ask late" in answer.message
    rig.contribute("a", 1)
    assert rig.state.version == 1, "nobody waited for it"
    rig.step("a", "late", steps=4)
    assert rig.told_of("late", Collect) == [Collect(0, 2, EPOCH)]


def test_a_control_stream_begins_with_all_that_could_have_been_missed() -> None:
    rig = Rig(run={"tokens": 1000}).started("a", "b")
    rig.take_told("a")
    rig.shard.attend(rig.members["a"])
    rig.advance()
    assert rig.take_told("a") == [Pulse(0, 1000, 2), Committed(0, 0, EPOCH), Collect(0, 1, EPOCH)]
    rig.contribute("a", 1)
    rig.take_told("a")
    rig.shard.attend(rig.members["a"])
    rig.advance()
    assert rig.told_of("a", Collect) == [], "it has contributed"


def test_the_same_push_again_is_a_duplicate_at_every_moment() -> None:
    rig = Rig(sync={"quorum": "all"}).started("a", "b")
    assert rig.contribute("a", 1).outcome is ACCEPTED
    assert rig.contribute("a", 1).outcome is DUPLICATE, "while the round is open"
    rig.holds_jobs = True
    rig.contribute("b", 1)
    assert rig.contribute("a", 1).outcome is DUPLICATE, "while it is computed"
    rig.finish_jobs()
    assert rig.contribute("a", 1).outcome is DUPLICATE, "and after it"
    assert rig.shard.ledger.duplicates == 3
    assert rig.shard.ledger.tokens_merged == 80
    rig.assert_accounts_balance()


@pytest.mark.parametrize("taken", ["in the round", "computed", "merged"])
def test_bad_bytes_of_a_copy_are_no_refusal_of_what_was_taken(taken: str) -> None:
    """Both copies were let in by their headers. The learner would give back what is going to be merged."""
    rig = Rig(sync={"quorum": "all" if taken == "in the round" else 1}).started("a", "b")
    member, header, _ = let_in(rig)
    rig.holds_jobs = taken == "computed"
    assert rig.contribute("a", 1).outcome is ACCEPTED
    assert rig.shard.taking.reject(member, header, DAMAGED).outcome is DUPLICATE
    assert not rig.shard.ledger.rejected
    assert not member.missed


@pytest.mark.parametrize("changes", [{"values": 2.0}, {"tokens": 41}])
@pytest.mark.parametrize("computing", [False, True])
def test_the_same_push_with_other_content_is_a_conflict(rig: Rig, changes: dict[str, Any], computing: bool) -> None:
    rig.contribute("a", 1, 1.0)
    if computing:
        rig.holds_jobs = True
        rig.contribute("b", 1)
    before = rig.snapshot()
    answer = rig.contribute("a", 1, **({"values": 1.0} | changes))
    assert (answer.outcome, answer.code, rig.snapshot()) == (REJECTED, "CONTRIBUTION_CONFLICT", before)


@pytest.mark.parametrize("computing", [False, True])
def test_a_contribution_to_a_round_that_has_closed_is_late(computing: bool) -> None:
    rig = Rig(sync={"quorum": 1}).started("a", "b")
    rig.holds_jobs = computing
    rig.take_told("b")
    rig.contribute("a", 1)
    assert rig.told_of("b", Committed) == ([] if computing else [Committed(0, 1, EPOCH)]), "it has no part in it"
    assert rig.contribute("b", 1).outcome is LATE
    assert (rig.shard.ledger.late, rig.shard.ledger.tokens_late) == (1, 40)
    assert rig.members["b"].missed == {"ABSENT": 1}
    rig.assert_accounts_balance()


REFUSALS: list[tuple[str, dict[str, Any]]] = [
    ("MANIFEST_MISMATCH", {"manifest_digest": "0" * 32}),
    ("WRONG_EPOCH", {"epoch": EPOCH - 1}),
    ("UNKNOWN_FRAGMENT", {"fragment_id": 9}),
    ("WRONG_ROUND", {"tokens": 0}),
    ("WRONG_ROUND", {"round": 3}),
    ("NOT_FINITE", {"values": torch.full((SIZE,), 1e30)}),
]


@pytest.mark.parametrize(("code", "changes"), REFUSALS, ids=[f"{c}-{next(iter(d))}" for c, d in REFUSALS])
def test_what_a_guard_refuses_is_counted_and_changes_nothing(rig: Rig, code: str, changes: dict[str, Any]) -> None:
    before = rig.snapshot()
    contribution = {"round_number": changes.get("round", 1), "values": 1.0} | changes
    contribution.pop("round", None)
    answer = rig.contribute("a", **contribution)
    assert (answer.outcome, answer.code, rig.snapshot()) == (REJECTED, code, before)
    assert answer.message
    assert rig.shard.ledger.rejected == {code: 1}
    assert rig.shard.ledger.tokens_refused[code] == changes.get("tokens", 40)
    rig.assert_accounts_balance()


@pytest.mark.parametrize(
    ("code", "encoding", "size", "number"),
    [
        ("UNKNOWN_ENCODING", "int8", SIZE, 1),
        ("UNKNOWN_ENCODING", "int8", SIZE, 0),  # a seed is not sent with a loss
        ("BAD_PAYLOAD", "float32", SIZE + 1, 1),
    ],
)
def test_sizes_and_encodings_are_refused_before_the_bytes(code: str, encoding: str, size: int, number: int) -> None:
    rig = Rig().started("a", "b") if number else Rig().joined("a", "b")
    before = rig.snapshot()
    answer = rig.shard.taking.admit(
        rig.members["a"], rig.header(number, encode_payload(torch.ones(size), encoding)), rig.now
    )
    assert (answer.outcome, answer.code, rig.snapshot()) == (REJECTED, code, before)


@pytest.mark.parametrize("values", [1e30, None], ids=["diverged", "says that nothing is finite"])
def test_one_learner_that_has_nothing_to_merge_holds_up_no_round_that_waits_for_all(
    values: float | None,
) -> None:
    rig = Rig().started("a", "b", "c")
    rig.contribute("a", 1, 1.0)
    answer = rig.contribute("b", 1, values or 0.0, not_finite=values is None)
    assert answer.code == "NOT_FINITE"
    assert rig.state.version == 0, "c is still to come"
    rig.contribute("c", 1, 1.0)
    assert rig.state.version == 1
    assert rig.members["b"].missed == {answer.code: 1}
    assert rig.noted(RoundClosed)[-1].participants == 2


def test_what_was_refused_is_answered_the_same_again_and_what_is_right_may_still_be_pushed(rig: Rig) -> None:
    refused = rig.contribute("a", 1, 1e30)
    assert rig.contribute("a", 1, 1e30) == refused
    assert rig.shard.ledger.rejected == {"NOT_FINITE": 1}
    assert rig.contribute("a", 1, 1.0).outcome is ACCEPTED
    rig.contribute("b", 1, 3.0)
    assert rig.theta == [-2.0]


def test_answers_about_a_round_are_remembered_within_a_bound_and_forgotten_with_it() -> None:
    rig = Rig(sync={"quorum": 1}).started("a", "b")
    for tokens in range(1, 1000):
        rig.contribute("b", 1, 1e30, tokens=tokens)
    assert 0 < sum(map(len, rig.state.declined.values())) <= DECLINED_MAX
    rig.contribute("a", 1)
    assert not rig.state.declined


def test_who_is_silent_past_its_lease_is_evicted_and_told_and_nobody_waits_for_it(rig: Rig) -> None:
    rig.contribute("a", 1, 1.0)
    rig.take_told("b")
    rig.silence("b", "a")
    assert [evicted.code for evicted in rig.told_of("b", Evicted)] == ["LEASE_EXPIRED"]
    assert rig.noted(LearnerGone) == [LearnerGone("b", 2, "LEASE_EXPIRED")]
    assert rig.shard.ledger.evictions == rig.members["b"].missed == {"LEASE_EXPIRED": 1}
    with pytest.raises(LeaseExpired):
        rig.shard.check("b", 2, EPOCH)
    assert (rig.state.version, rig.theta, rig.noted(RoundClosed)[-1].why) == (1, [-1.0], "lease")


def test_what_an_evicted_learner_contributed_is_fenced(rig: Rig) -> None:
    rig.contribute("b", 1, 9.0)
    rig.silence("b", "a")
    assert rig.shard.ledger.tokens_fenced == 40
    assert rig.members["b"].missed == {"FENCED": 1}
    rig.assert_accounts_balance()
    rig.contribute("a", 1, 1.0)
    assert rig.theta == [-1.0]
    rig.assert_accounts_balance()


def test_what_is_being_merged_is_not_fenced(rig: Rig) -> None:
    rig.holds_jobs = True
    rig.contribute("a", 1, 1.0)
    rig.contribute("b", 1, 3.0)
    rig.silence("b", "a")
    rig.finish_jobs()
    assert rig.theta == [-2.0]
    assert rig.shard.ledger.tokens_fenced == 0
    again = rig.join("b", process_id="process")
    assert rig.shard.join_answer("b").fragments[0].merged_version == 1
    assert again.merged == 1
    rig.assert_accounts_balance()


@pytest.mark.parametrize(
    ("process_id", "error"), [("process", StaleGeneration), ("process 2", Superseded)], ids=["again", "another"]
)
def test_the_newer_generation_wins_and_the_older_is_told_why(rig: Rig, process_id: str, error: type) -> None:
    rig.contribute("a", 1, 9.0)
    rig.take_told("a")
    old = rig.members["a"].generation
    new = rig.join("a", process_id=process_id).generation
    assert new > old
    assert [evicted.code for evicted in rig.told_of("a", Evicted)] == [error.code]
    assert rig.noted(LearnerGone) == [LearnerGone("a", old, error.code)]
    assert rig.shard.ledger.tokens_fenced == 40
    with pytest.raises(error):
        rig.shard.check("a", old, EPOCH)
    assert rig.shard.check("a", new, EPOCH).generation == new
    assert rig.contribute("a", 1).code == "WRONG_ROUND", "the round asked the generation before"
    rig.assert_accounts_balance()


def test_a_round_that_lost_its_quorum_asks_again_although_another_learner_hangs() -> None:
    """The contribution that made the quorum is fenced off, and nothing else would come."""
    rig = Rig(sync={"quorum": 1, "grace": 20.0}).started("a", "hangs")
    rig.contribute("a", 1, 1.0)
    rig.join("a", process_id="process 2")
    train_beside_one_that_hangs(rig, 20, "a")
    assert [collect.round for collect in rig.told_of("a", Collect)] == [1]
    assert rig.contribute("a", 1, 1.0).outcome is Outcome.ACCEPTED
    train_beside_one_that_hangs(rig, 20)  # the grace window begins anew
    assert rig.state.version == 1


def train_beside_one_that_hangs(rig: Rig, seconds: int, *learner_ids: str) -> None:
    """A step per second of these; the others only report. What was told before is forgotten."""
    rig.told.clear()
    for _ in range(seconds):
        rig.now += 1.0
        rig.step(*learner_ids)
        for other in rig.members.keys() - {*learner_ids}:
            rig.report(other)


def test_who_leaves_keeps_what_it_contributed_and_is_not_waited_for() -> None:
    rig = Rig().started("a", "b", "c")
    rig.contribute("a", 1, 1.0)
    rig.shard.leave(rig.members["a"])
    rig.shard.leave(rig.members["b"])
    rig.advance()
    assert rig.state.version == 0
    rig.contribute("c", 1, 3.0)
    assert rig.theta == [-2.0]
    assert rig.members["b"].missed == {"LEFT": 1}
    assert rig.members["a"].missed == {}
    with pytest.raises(NotJoined, match="has left"):
        rig.shard.check("a", rig.members["a"].generation, EPOCH)
    assert [e.code for e in rig.noted(LearnerGone)] == ["LEFT", "LEFT"]


@pytest.mark.parametrize("end", ["left", "evicted", "joined again"])
def test_a_learner_that_starts_over_counts_its_steps_from_where_it_is(end: str) -> None:
    """Its old count is far ahead; held against that, it would not be asked for a long time."""
    rig = Rig(sync={"quorum": 1}).joined("a")
    rig.seed("a")
    rig.step("a", steps=100)
    rig.contribute("a", 1)
    if end == "left":
        rig.shard.leave(rig.members["a"])
    elif end == "evicted":
        rig.silence("a")
    rig.steps["a"] = 0
    rig.join("a")
    rig.take_told("a")
    rig.step("a", steps=3)
    assert rig.told_of("a", Collect) == []
    rig.step("a")
    assert rig.told_of("a", Collect) == [Collect(0, 2, EPOCH)]


def test_a_forgotten_learner_leaves_nothing_behind() -> None:
    rig = Rig(shard={"max_learners": 2}, sync={"quorum": 1}).started("a")
    rig.contribute("a", 1)
    for name in (f"passing-{i}" for i in range(50)):
        rig.join(name)
        rig.report("a")
        rig.step(name, steps=4)
        assert rig.contribute(name, rig.state.round.round).outcome is ACCEPTED
        assert name in rig.state.record.merged_versions
        rig.shard.leave(rig.members[name])
        rig.advance(0.1)
    state = rig.state
    remembered = rig.shard.membership.all(), state.record.merged_versions, state.base_steps, state.base_tokens
    assert max(map(len, remembered)) <= 4
    assert len(rig.noted(LearnerForgotten)) == 48


def forget_a(rig: Rig) -> None:
    """It leaves, and another one after it, of whom only one is remembered."""
    rig.shard.leave(rig.members["a"])
    rig.now += 1
    rig.join("b")
    rig.shard.leave(rig.members["b"])
    rig.advance()
    assert rig.shard.membership.get("a") is None


@pytest.mark.parametrize("when", ["merged", "computed"])
def test_a_forgotten_learner_that_comes_back_hears_that_its_merges_are_not_known(when: str) -> None:
    """It would count what is merged as not merged, and contribute it once more."""
    rig = Rig(shard={"max_learners": 1}).started("a")
    rig.holds_jobs = when == "computed"
    rig.contribute("a", 1)
    forget_a(rig)
    rig.finish_jobs()
    rig.join("a")
    (status,) = rig.shard.join_answer("a").fragments
    assert (status.version, status.merged_version, status.forgotten_version) == (1, 0, 1)
    assert rig.contribute("a", 1).outcome is DUPLICATE, "and not LATE: it would be given back"


def test_a_shard_that_drains_takes_no_learner_and_opens_no_round_but_finishes_the_open_one() -> None:
    rig = Rig().started("a")
    rig.take_told("a")
    rig.shard.drain()
    rig.advance()
    assert rig.told_of("a", Drain) == [Drain()]
    with pytest.raises(Draining):
        rig.shard.join("b", asking(MODEL), 0.0)
    assert rig.contribute("a", 1).outcome is ACCEPTED
    assert rig.state.version == 1
    rig.step("a", steps=20)
    assert rig.state.round is None
    rig.shard.attend(rig.members["a"])
    rig.advance()
    assert rig.told_of("a", Drain) == [Drain()]


def test_the_run_ends_when_the_merged_tokens_reach_the_budget() -> None:
    rig = Rig(run={"tokens": 80}).started("a")
    rig.contribute("a", 1)
    assert not rig.shard.done
    rig.step("a", steps=4)
    rig.take_told("a")
    rig.contribute("a", 2)
    assert rig.shard.done
    assert rig.noted(BudgetReached) == [BudgetReached(80)]
    assert rig.told_of("a", Stop) == [Stop()]
    rig.step("a", steps=20)
    assert rig.state.round is None
    rig.join("b")
    rig.shard.attend(rig.members["b"])
    rig.advance()
    assert rig.told_of("b", Stop) == [Stop()]
    assert len(rig.noted(BudgetReached)) == 1


def test_the_last_round_does_not_wait_for_h_steps() -> None:
    rig = Rig(run={"tokens": 60}).started("a")
    rig.contribute("a", 1)
    rig.step("a")
    assert rig.state.round is None
    rig.step("a")  # 40 merged, 20 trained since
    assert rig.state.round is not None


def test_the_run_ends_only_when_every_fragment_has_its_tokens() -> None:
    rig = Rig([TensorSpec("w", (2, 8))], sync={"fragments": 2, "sync_every": 4}, run={"tokens": 40}).joined("a")
    for fragment_id in (0, 1):
        rig.seed("a", fragment_id=fragment_id)
    rig.step("a", steps=4)
    assert rig.contribute("a", 1, fragment_id=0).outcome is ACCEPTED
    assert (rig.shard.tokens_merged, rig.shard.done) == (20, False), "40 of one fragment, 0 of the other"
    rig.step("a", steps=9)
    assert rig.shard.fragments[0].round is None, "this fragment has its tokens"
    assert rig.contribute("a", 1, fragment_id=1).outcome is ACCEPTED
    assert rig.shard.done


def test_no_copy_of_what_was_refused_is_taken_when_the_round_opens_again() -> None:
    """The learner has given its work back. The copy was let in before that, and its bytes came slowly."""
    rig = Rig().started("a")
    member, header, payload = let_in(rig)
    refused = rig.shard.taking.reject(member, header, DAMAGED)
    rig.advance()
    assert rig.state.round is None
    rig.step("a", steps=4)
    assert rig.shard.taking.contribute(member, header, payload, (1.0,), 0.0) == refused
    assert not rig.state.round.contributions
    rig.advance()
    assert rig.state.round is None, "nobody waits for what was refused"
    assert rig.shard.ledger.rejected == {"BAD_CHECKSUM": 1}


@pytest.mark.parametrize("first", [LATE, REJECTED])
def test_no_copy_of_what_came_between_two_leases_is_taken_when_the_round_opens_again(rig: Rig, first: Outcome) -> None:
    """A new lease ends the round's old one, so the contribution is refused, or late if no round is open. Later the
    same round opens again and asks the new lease: only what is made for that counts."""
    rig.join("a", *("b" if first is LATE else ""))
    assert (rig.state.round is None) is (first is LATE)
    assert rig.contribute("a", 1).outcome is first
    rig.join("b")
    rig.step("a", "b", steps=4)
    assert rig.state.round.asked["a"] == rig.members["a"].generation
    assert rig.contribute("a", 1).outcome is first, "a copy that comes late"
    for learner_id in "ab":
        assert rig.contribute(learner_id, 1, tokens=80, steps=8).outcome is ACCEPTED
    assert rig.state.tokens_merged == 160


def test_a_version_is_announced_only_once_it_is_computed() -> None:
    rig = Rig().started("a")
    rig.take_told("a")
    rig.holds_jobs = True
    rig.contribute("a", 1, 5.0)
    assert rig.state.computing
    assert (rig.state.version, rig.theta, rig.told_of("a", Committed)) == (0, [0.0], [])
    rig.step("a", steps=9)
    assert rig.state.round is None, "no round opens meanwhile"
    rig.assert_accounts_balance()
    rig.finish_jobs()
    assert (rig.state.version, rig.theta) == (1, [-5.0])
    assert rig.state.round is not None
