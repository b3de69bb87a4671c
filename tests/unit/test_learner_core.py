"""What a learner does at a step boundary: snapshots, versions laid under progress, and work that is never lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from builders import decoded
from diloco_common.codec.base import Reference
from diloco_common.errors import BadChecksum, TooStale, WrongRound
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, FragmentStatus, LearnerPolicy, Outcome, PushAnswer
from diloco_worker.core.fragment import Lease, PendingContribution
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.core.tensors import Difference

EPOCH = 7
ACCEPTED = PushAnswer(Outcome.ACCEPTED)
LATE = PushAnswer(Outcome.LATE)


def rejected(code: str) -> PushAnswer:
    return PushAnswer(Outcome.REJECTED, code, "words")


class Rig:
    """A learner of one parameter of two elements and one fragment, whose numbers can be read with the naked eye."""

    def __init__(self, version: int | None = 0, at: float = 10.0) -> None:
        self.model = nn.Module()
        self.model.w = nn.Parameter(torch.full((2,), at))
        self.replica = replica = Replica(self.model)
        policy = LearnerPolicy(4, "float32", "float32")
        self.core = LearnerCore(replica, cut(replica.specs, 1, 1), policy)
        if version is not None:
            self.arrives(version, at)

    @property
    def fragment(self):
        return self.core.fragments[0]

    @property
    def theta(self) -> float:
        first, second = self.model.w.tolist()
        assert first == second
        return float(first)

    def trains(self, by: float | list[float], tokens: int = 5) -> None:
        with torch.no_grad():
            self.model.w.add_(torch.tensor(by))
        self.core.stepped(tokens)

    def arrives(self, version: int, value: float, merged: int = 0, epoch: int = EPOCH, forgotten: int = 0) -> bool:
        with torch.no_grad():
            values = torch.full((2,), value)
            return self.core.arrived(0, version, epoch, values, merged, forgotten_version=forgotten) is not None

    def asked(self, round_number: int, epoch: int = EPOCH) -> list[PendingContribution]:
        """What the learner contributes; it is pushed."""
        self.core.collect(Collect(0, round_number, epoch), epoch)
        taken = self.core.contribute()
        for contribution in taken:
            contribution.pushes.begin(Lease(epoch, 1))
            contribution.pushes.sending_values()
        return taken

    def contributes(self, round_number: int = 1, by: float | list[float] = 2.0, tokens: int = 5) -> PendingContribution:
        self.trains(by, tokens)
        (contribution,) = self.asked(round_number)
        return contribution

    def answered(self, round_number: int, answer: PushAnswer) -> None:
        self.core.answered(0, round_number, answer)

    def loses(self) -> Tensor:
        """Round 1 merges a contribution of which the encoder has lost something. Returns what."""
        self.trains(by=[2.0, 0.42])
        (contribution,) = self.asked(1)
        contribution.tensors.encode("int4")
        self.arrives(1, 12.0, merged=1)
        return contribution.tensors.loss.clone()

    def next_delta(self, round_number: int) -> float:
        (contribution,) = self.asked(round_number)
        return float(delta_of(contribution)[0])


def delta_of(contribution: PendingContribution) -> Tensor:
    """What is encoded."""
    snapshot, residual = delta_of_snapshot(contribution), contribution.tensors.residual
    return snapshot if residual is None else snapshot + residual


def delta_of_snapshot(contribution: PendingContribution) -> Tensor:
    return contribution.tensors.snapshot.float()


def test_before_its_first_version_a_learner_offers_its_own_values_and_answers_no_round() -> None:
    rig = Rig(at=10.0, version=None)
    rig.trains(by=2.0)
    assert rig.asked(1) == []
    assert rig.fragment.tensors.values().tolist() == [12.0, 12.0]


def test_what_is_trained_without_a_shard_lies_on_top_of_its_first_version() -> None:
    rig = Rig(at=10.0, version=None)
    rig.trains(by=100.0)  # before: not contributed
    rig.core.begin_without()
    assert not rig.fragment.is_adopted
    assert rig.asked(1) == [], "nobody has a version of what it began from"
    rig.trains(by=1.0, tokens=7)

    rig.arrives(3, 50.0)

    assert rig.fragment.is_adopted
    assert rig.theta == 51.0
    (contribution,) = rig.asked(4)
    assert (delta_of(contribution)[0], contribution.tokens, contribution.base_version) == (-1.0, 7, 3)


def test_a_contribution_is_anchor_minus_snapshot_with_its_tokens_and_steps() -> None:
    rig = Rig(at=10.0, version=3)
    rig.trains(by=1.0, tokens=5)
    contribution = rig.contributes(4, by=1.0, tokens=7)
    assert delta_of(contribution).tolist() == [-2.0, -2.0]
    assert (contribution.round, contribution.base_version, contribution.epoch) == (4, 3, EPOCH)
    assert (contribution.tokens, contribution.steps) == (12, 2)
    assert rig.core.unmerged == 1


@pytest.mark.parametrize(
    ("round_number", "epoch", "answered"),
    [(4, EPOCH, True), (3, EPOCH, False), (1, EPOCH, False), (4, EPOCH + 1, False), (1, EPOCH + 1, False)],
)
def test_only_rounds_after_its_version_and_of_its_epoch_are_answered(
    round_number: int, epoch: int, answered: bool
) -> None:
    rig = Rig(version=3)
    rig.trains(by=1.0)
    assert bool(rig.asked(round_number, epoch)) is answered


@pytest.mark.parametrize(
    ("asked", "arrives", "answered"),
    [
        ((1, EPOCH + 1), (0, EPOCH + 1), [(1, EPOCH + 1, 0)]),  # once a version of the new epoch is there
        ((4, EPOCH), (4, EPOCH), []),  # it is overtaken: the push would be LATE, and the bytes wasted
    ],
)
def test_a_version_decides_on_a_round_that_has_asked(asked, arrives, answered) -> None:
    rig = Rig(version=3)
    rig.trains(by=1.0)
    rig.core.collect(Collect(0, *asked), asked[1])
    rig.arrives(arrives[0], 10.0, epoch=arrives[1])
    assert [(c.round, c.epoch, c.base_version) for c in rig.core.contribute()] == answered


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.LATE])
def test_a_round_that_asks_again_before_its_refusal_is_heard_gets_another_contribution(outcome: Outcome) -> None:
    """It waits for one, and does not ask a third time. The one that was refused is not pushed again."""
    rig = Rig()
    rig.trains(by=1.0, tokens=3)
    (first,) = rig.asked(1)
    rig.asked(1)
    rig.trains(by=1.0, tokens=4)
    rig.answered(1, PushAnswer(outcome))

    (second,) = rig.core.contribute()

    assert second is not first
    assert (second.round, second.tokens) == (1, 7)
    rig.answered(1, PushAnswer(outcome))
    assert rig.core.contribute() == []


@pytest.mark.parametrize("comes_between", [False, True])
def test_a_round_that_asks_again_gets_the_same_contribution(*, comes_between: bool) -> None:
    """It says where its work began, whatever came since."""
    rig = Rig()
    rig.trains(by=1.0, tokens=3)
    (first,) = rig.asked(2)
    rig.trains(by=1.0, tokens=4)
    if comes_between:
        rig.arrives(1, 20.0)
    (again,) = rig.asked(2)
    assert again is first
    assert (again.since, again.tokens, rig.core.contributions["taken"]) == (0, 3, 1)


def test_one_contribution_is_under_way_at_a_time() -> None:
    rig = Rig()
    rig.contributes(by=1.0)
    rig.trains(by=1.0)
    assert rig.asked(2) == [], "the fate of the first is not known yet"
    rig.arrives(1, 11.0, merged=1)
    (contribution,) = rig.core.contribute()
    assert (contribution.round, contribution.base_version, contribution.tokens, contribution.steps) == (2, 1, 5, 1)


# Anchor 10; trained +2 before the snapshot, and +1 after it; then version 1 arrives as 20.
@pytest.mark.parametrize("fate", ["merged", "carried", None], ids=["merged", "not merged", "not asked"])
def test_a_version_is_laid_under_the_progress_of_a_participant_and_of_others(fate: str | None) -> None:
    rig = Rig()
    rig.trains(by=1.0)
    if fate is None:
        rig.trains(by=1.0)
    else:
        rig.contributes(by=1.0)
    rig.trains(by=1.0)
    assert rig.arrives(4, 20.0, merged=1 if fate == "merged" else 0)
    # new + (theta - snapshot), or - anchor
    theta, tokens_left = (20.0 + 1.0, 5) if fate == "merged" else (20.0 + 3.0, 15)
    assert (rig.theta, rig.fragment.version) == (theta, 4)
    assert rig.fragment.tokens_since(rig.core.tokens) == tokens_left
    assert rig.fragment.tensors.anchor is not None
    assert rig.fragment.tensors.anchor.float().tolist() == [20.0, 20.0]
    assert rig.core.unmerged == 0
    assert rig.core.contributions == ({} if fate is None else {"taken": 1, fate: 1})


@pytest.mark.parametrize(
    ("version", "epoch", "is_applied"), [(0, EPOCH, False), (2, EPOCH, False), (3, EPOCH, False), (0, EPOCH + 1, True)]
)
def test_a_version_that_is_no_newer_changes_nothing_but_in_another_epoch_whatever_its_number_counts(
    version: int, epoch: int, is_applied: bool
) -> None:
    rig = Rig(version=3)
    rig.trains(by=1.0)
    assert rig.arrives(version, 20.0, epoch=epoch) is is_applied
    named = (rig.theta, rig.fragment.version, rig.fragment.epoch)
    assert named == ((21.0, 0, EPOCH + 1) if is_applied else (11.0, 3, EPOCH))


def test_a_contribution_to_a_later_round_moves_along_with_the_version_before_it() -> None:
    """Its delta stays as it was sent; what counts as trained since its snapshot stays, too."""
    rig = Rig()
    rig.trains(by=2.0)
    (contribution,) = rig.asked(2)  # version 1 is announced, but has not arrived yet
    rig.trains(by=1.0)
    rig.arrives(1, 20.0)
    assert rig.theta == 23.0
    assert delta_of(contribution).tolist() == [-2.0, -2.0]
    assert rig.core.unmerged == 1
    rig.arrives(2, 22.0, merged=2)  # version 1 and the contribution
    assert rig.theta == 23.0, "22 + the one step after the snapshot"
    assert rig.fragment.tokens_since(rig.core.tokens) == 5


def theta_at(reference: Reference) -> Tensor:
    values, progress = reference
    return values.float() if progress is None else values.float() - progress.float()


def computed_ahead(rig: Rig, values: Tensor, version: int, merged_version: int) -> Difference:
    """As the codec thread does."""
    reference = rig.fragment.tensors.reference_of(version, merged_version)
    assert reference is not None
    return Difference(reference, values - theta_at(reference))


def overtaken(rig: Rig) -> None:
    rig.arrives(1, 15.0)


def contributed(rig: Rig) -> None:
    """The contribution that the version holds is taken."""
    rig.asked(2)


@pytest.mark.parametrize(
    ("meanwhile", "merged_version", "theta"),
    [(overtaken, 0, 22.0), (contributed, 2, 20.0), (contributed, 0, 22.0)],
    ids=["another-version", "merged", "not-merged"],
)
def test_what_was_computed_ahead_from_another_reference_is_computed_again(
    meanwhile: Callable[[Rig], None], merged_version: int, theta: float
) -> None:
    rig = Rig(at=10.0)
    rig.trains(by=2.0)
    values = torch.full((2,), 20.0)
    difference = computed_ahead(rig, values, 2, merged_version)
    meanwhile(rig)
    with torch.no_grad():
        rig.core.arrived(0, 2, EPOCH, values, merged_version, difference)
    assert rig.theta == theta


@pytest.mark.parametrize(
    ("answer", "counted"),
    [
        (LATE, {"carried": 1}),
        (rejected(WrongRound.code), {"carried": 1}),
        (rejected(TooStale.code), {"carried": 1, TooStale.code: 1}),
        (rejected(BadChecksum.code), {"carried": 1, BadChecksum.code: 1}),
    ],
)
def test_a_contribution_that_is_not_taken_gives_its_work_back(answer: PushAnswer, counted: dict[str, int]) -> None:
    rig = Rig()
    rig.contributes()
    rig.answered(1, answer)
    assert rig.core.contributions == {"taken": 1} | counted
    assert rig.core.tokens_carried == 5
    contribution = rig.contributes(by=1.0)
    assert (delta_of(contribution).tolist(), contribution.tokens, contribution.steps) == ([-3.0, -3.0], 10, 2)


@pytest.mark.parametrize(
    ("merged", "answer", "next_delta"),
    [
        (True, ACCEPTED, 0.5),  # what the encoder lost comes with the next one
        (False, ACCEPTED, -2.0),  # as if it had not been taken
        (False, LATE, -2.0),
    ],
)
def test_what_the_encoder_lost_is_kept_only_of_what_was_merged(
    merged: bool, answer: PushAnswer, next_delta: float
) -> None:
    rig = Rig()
    contribution = rig.contributes()
    contribution.tensors.loss = torch.full((2,), 0.5)  # the encoder leaves its loss here
    rig.answered(1, answer)
    rig.arrives(1, 12.0, merged=1 if merged else 0)
    rig.trains(by=0.0)
    assert rig.next_delta(2) == next_delta


@pytest.mark.parametrize("encodes", [[True], [True, False, True], [False]])
@pytest.mark.parametrize("stows", [False, True], ids=["here", "in-host-memory"])
def test_a_residual_comes_back_from_contributions_that_were_not_merged(encodes: list[bool], stows: bool) -> None:
    """Of any number of them, encoded or not before their fate was known."""
    rig = Rig()
    rig.replica.stow = torch.clone if stows else None
    lost = rig.loses()
    assert lost.abs().max() > 0.05

    for number, is_encoded in enumerate(encodes, 2):
        contribution = rig.contributes(number, by=[0.7, 2.0])
        if is_encoded:
            payload = contribution.tensors.encode("int4")
            assert contribution.tensors.encode("int4") is payload, "an answer that was lost: it is encoded once"
        rig.answered(number, LATE)
        rig.arrives(number, 12.0)

    contribution = rig.contributes(9, by=0.0)
    x = contribution.tensors.snapshot.float()
    sent = decoded(contribution.tensors.encode("int4"))
    torch.testing.assert_close(sent + contribution.tensors.loss.float(), x + lost.float(), rtol=0, atol=0.005)


def asked_after_a_restart() -> tuple[Rig, PendingContribution]:
    """It holds version 3 of EPOCH, from which the shard goes on in EPOCH + 1; round 4 has asked, and is answered."""
    rig = Rig(version=3)
    rig.core.rejoined(status(3, 0), EPOCH + 1)
    rig.trains(by=2.0)
    rig.core.collect(Collect(0, 4, EPOCH), EPOCH + 1)
    (contribution,) = rig.core.contribute()
    return rig, contribution


def status(version: int, merged_version: int, *, seeded: bool = True) -> list[FragmentStatus]:
    return [FragmentStatus(0, seeded, version, merged_version, EPOCH)]


@pytest.mark.parametrize(
    ("statuses", "epoch", "kept"),
    [
        (status(4, 4), EPOCH, True),  # in the same epoch its fate stays open
        (status(0, 0, seeded=False), EPOCH + 1, False),  # nothing survived
        (status(3, 2), EPOCH + 1, False),  # the round was open: push it again
        (status(4, 4), EPOCH + 1, True),  # it is in a version that is there
        (status(4, 0), EPOCH + 1, False),  # the version was made without it
    ],
)
def test_a_shard_that_was_restored_has_a_contribution_or_gets_its_work_again(
    statuses: list[FragmentStatus], epoch: int, kept: bool
) -> None:
    rig = Rig(version=3)
    rig.contributes(4)
    rig.trains(by=1.0)
    rig.core.rejoined(statuses, epoch)
    assert rig.core.unmerged == (1 if kept else 0)
    (told,) = statuses
    rig.arrives(told.version, 20.0, merged=told.merged_version, epoch=epoch)
    assert rig.theta == (21.0 if kept else 23.0)
    assert rig.core.unmerged == 0


@pytest.mark.parametrize("rejoins", [False, True])
def test_what_a_shard_has_forgotten_counts_as_merged_and_is_not_pushed_again(rejoins: bool) -> None:
    """Through its restart, too."""
    rig = Rig(version=3)
    rig.contributes(4)
    rig.trains(by=1.0)
    if rejoins:
        rig.core.rejoined([FragmentStatus(0, True, 6, 0, EPOCH, 4)], EPOCH + 1)
        assert rig.core.unmerged == 1, "the next version tells"
    assert rig.arrives(6, 20.0, merged=0, forgotten=4)
    assert rig.theta == 21.0, "what was trained since goes on"
    assert rig.fragment.tokens_since(rig.core.tokens) == 5
    assert (rig.core.contributions["forgotten"], rig.core.contributions["carried"], rig.core.unmerged) == (1, 0, 0)


@pytest.mark.parametrize(
    ("forgotten", "version", "sent"), [(3, 6, True), (5, 3, True), (4, 6, False)],
    ids=["an earlier one is forgotten", "the version is before it", "never sent"],
)  # fmt: skip
def test_what_cannot_have_been_forgotten_is_given_back(forgotten: int, version: int, sent: bool) -> None:
    rig = Rig(version=3)
    contribution = rig.contributes(4)
    contribution.pushes.may_have_arrived = sent
    rig.core.rejoined([FragmentStatus(0, True, version, 0, EPOCH, forgotten)], EPOCH + 1)
    assert (rig.core.contributions["carried"], rig.core.unmerged) == (1, 0)


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_version_of_a_later_epoch_follows_one_that_was_kept(is_renamed: bool) -> None:
    """The shard has restarted and goes on from (EPOCH, 3): its next version is (EPOCH + 1, 4).

    Or 3 has a new name, as another learner held a version that is lost. Ours is relative to what came back, and is
    still in the round."""
    rig, contribution = asked_after_a_restart()
    assert (contribution.shard_epoch, contribution.epoch, contribution.base_version) == (EPOCH + 1, EPOCH, 3)
    if is_renamed:
        assert rig.arrives(3, 10.0, epoch=EPOCH + 1)
        assert (rig.theta, rig.core.unmerged) == (12.0, 1)
    rig.trains(by=1.0)
    assert rig.arrives(4, 20.0, merged=4, epoch=EPOCH + 1)
    assert (rig.theta, rig.fragment.epoch, rig.core.unmerged) == (21.0, EPOCH + 1, 0)


def test_tokens_are_unmerged_until_a_version_tells_that_it_holds_them() -> None:
    rig = Rig()
    rig.trains(-1.0, tokens=5)
    assert rig.core.tokens_unmerged == 5
    rig.asked(1)
    rig.trains(-1.0, tokens=7)
    assert rig.core.tokens_unmerged == 12, "it may be late"
    rig.arrives(1, 9.0, merged=1)
    assert rig.core.tokens_unmerged == 7


def test_what_is_lost_with_a_version_is_not_taken_for_merged() -> None:
    """It holds (EPOCH, 5) and has contributed to round 6; the shard came back with version 3 under a new name."""
    rig = Rig(version=5)
    rig.contributes(6)
    rig.core.rejoined([FragmentStatus(0, True, 3, 3, EPOCH + 1)], EPOCH + 1)
    assert rig.core.unmerged == 0
    rig.core.collect(Collect(0, 4, EPOCH + 1), EPOCH + 1)
    assert rig.core.contribute() == [], "not before the version that the round is relative to is there"
    assert rig.arrives(3, 7.0, merged=3, epoch=EPOCH + 1)
    (contribution,) = rig.core.contribute()
    assert (rig.theta, contribution.round, contribution.epoch, contribution.base_version) == (9.0, 4, EPOCH + 1, 3)
