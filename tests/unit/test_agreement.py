"""What a learner believes of the shards that give it a lease, and how many of them it takes to end it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_common.errors import ConfigError, DilocoError, ManifestMismatch, Superseded, UnknownEncoding, WrongRun
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_common.wire.messages import FragmentStatus, LearnerPolicy, Pulse
from diloco_worker.core.agreement import Agreement, Objections, Shards
from diloco_worker.core.events import Joined

TENSORS = (TensorSpec("a", (8,)), TensorSpec("b", (8,)))
DIGEST = cut(TENSORS, 2, 2).digest
POLICY = LearnerPolicy(4, "int8", "bfloat16")
FIRST = Joined(1, 1, 1.0, 0, 2, 2, DIGEST, POLICY, (), Pulse(0, 0), address="ps-0:50051")
SECOND = replace(FIRST, address="ps-1:50051", shard_index=1)


def owning(*fragment_ids: int) -> tuple[FragmentStatus, ...]:
    return tuple(FragmentStatus(i, True, 0, 0, 1) for i in fragment_ids)


def policy(**changes: Any) -> LearnerPolicy:
    return replace(POLICY, **changes)


@pytest.mark.parametrize(
    ("before", "says", "error", "why"),
    [
        ([], replace(FIRST, num_shards=3), ConfigError, "has 3 shards .* but 2 addresses"),
        ([], replace(FIRST, num_fragments=1), ManifestMismatch, "the model cannot be cut as ps-0:50051 says"),
        ([], replace(FIRST, policy=policy(push_encoding="os:system")), UnknownEncoding, "os:system"),
        ([FIRST], replace(SECOND, shard_index=0), ConfigError, "ps-0:50051 and ps-1:50051 both are shard 0"),
        ([FIRST], replace(SECOND, manifest_digest="x"), ManifestMismatch, "ps-1:50051 cuts the model in"),
        ([FIRST], replace(SECOND, policy=policy(sync_every=5)), ManifestMismatch, "ps-1:50051 cuts the model"),
        ([FIRST], replace(SECOND, fragments=owning(0)), ManifestMismatch, r"ps-1:50051 says that it owns .* \[0\]"),
        ([FIRST, SECOND], replace(SECOND, shard_index=0), ConfigError, "was shard 1 and says now .* shard 0"),
        ([FIRST, SECOND], replace(FIRST, policy=policy(push_encoding="int4")), ManifestMismatch, "ps-0:50051 before"),
    ],
)  # fmt: skip
def test_a_shard_that_does_not_belong_here_is_not_believed(
    before: list[Joined], says: Joined, error: type[DilocoError], why: str
) -> None:
    agreement = Agreement(2, TENSORS)
    for shard in before:
        agreement.take(shard)

    with pytest.raises(error, match=why):
        agreement.take(says)
    for shard in (FIRST, SECOND):  # as if it had said nothing
        agreement.take(shard)


@pytest.mark.parametrize(
    "back",
    [
        replace(SECOND, epoch=2, fragments=owning(1)),
        replace(SECOND, policy=policy(pull_encoding="int8", sync_every=9)),
    ],
)
def test_a_shard_that_comes_back_may_have_another_epoch_and_h_and_pulls(back: Joined) -> None:
    agreement = Agreement(2, TENSORS)
    for shard in (FIRST, SECOND, back):
        agreement.take(shard)


@pytest.mark.parametrize(("rules", "is_taken"), [("sync.merge rda", True), ("", True), ("sync.merge mean", False)])
def test_shards_make_versions_by_the_same_rules(rules: str, is_taken: bool) -> None:
    """Empty: of a release that did not say."""
    agreement = Agreement(2, TENSORS)
    agreement.take(replace(FIRST, rules="sync.merge rda"))
    second = replace(SECOND, rules=rules)
    if is_taken:
        agreement.take(second)
    else:
        with pytest.raises(ConfigError, match=r"ps-1:50051 makes versions by .* mean, ps-0:50051 by .* rda"):
            agreement.take(second)


TAKEN, WRONG, OTHER = Superseded("another process"), WrongRun("another run"), ManifestMismatch("another model")


@pytest.mark.parametrize(
    ("shards", "raised", "ends"),
    [
        (1, [TAKEN], True),
        (2, [TAKEN], False),
        (2, [TAKEN, TAKEN], True),
        (2, [WRONG, OTHER], True),
        (2, [TAKEN, WRONG], False),  # neither has a majority
        (3, [TAKEN, TAKEN], True),
        (3, [WRONG, TAKEN], False),
    ],
)
def test_what_most_shards_have_against_a_learner_ends_it(shards: int, raised: list[DilocoError], ends: bool) -> None:
    objections = Objections(shards)
    said = [objections.raised(f"ps-{i}:50051", error) for i, error in enumerate(raised)]
    assert said == [False] * (len(raised) - 1) + [ends]


def test_where_nobody_listens_has_no_say_in_how_a_learner_was_started() -> None:
    objections = Objections(3)
    assert not objections.raised("ps-0:50051", WRONG, num_gone=1)
    assert objections.raised("ps-0:50051", WRONG, num_gone=2)
    assert not objections.raised("ps-0:50051", TAKEN, num_gone=2)
    objections.withdrawn("ps-1:50051")
    assert not objections.raised("ps-0:50051", WRONG, num_gone=2), "by now it is in the run"


def test_a_run_is_complete_once_every_address_is_another_shard_of_it() -> None:
    shards = Shards(2)

    assert (shards.join(FIRST), shards.are_complete) == (True, False)
    assert (shards.join(SECOND), shards.are_complete) == (True, True)
    assert not shards.join(replace(FIRST, epoch=2)), "it is not new, it came back"
    assert [s.epoch for s in shards.joined] == [2, 1]


def test_a_shard_that_came_back_has_not_stopped() -> None:
    shards = Shards(2)
    for shard in (FIRST, SECOND):
        shards.join(shard)
        shards.stop(shard.shard_index)
    assert shards.have_stopped

    shards.join(FIRST)
    assert not shards.have_stopped
