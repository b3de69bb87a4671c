"""What learners hold fixed must be the same: who declares it, how long that binds, and how a refusal reads."""

from __future__ import annotations

from typing import Any

import pytest

from builders import asking
from diloco_common.errors import FrozenMismatch
from diloco_common.wire.messages import FrozenTensor
from rig import MODEL, Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()


def base(values: int, *, names: str = "abc", form: str = "bfloat16 [4, 4]") -> list[FrozenTensor]:
    return [FrozenTensor(f"{name}.weight", form, values) for name in names]


def joined(rig: Rig, learner_id: str, frozen: list[FrozenTensor]) -> None:
    rig.members[learner_id] = rig.shard.join(learner_id, asking(MODEL, frozen=tuple(frozen)), rig.now)
    rig.steps.setdefault(learner_id, 0)
    rig.report(learner_id)


def refused(rig: Rig, frozen: list[FrozenTensor]) -> str:
    """How another learner with these is refused; nothing has changed."""
    there = rig.shard.membership.all()
    with pytest.raises(FrozenMismatch) as refusal:
        rig.shard.join("other", asking(MODEL, frozen=tuple(frozen)), rig.now)
    assert rig.shard.membership.all() == there
    return str(refusal.value)


SAME = base(1)
UNKNOWN = [FrozenTensor(t.name, t.form, None) for t in SAME]
MIXED = [FrozenTensor("a.weight", "float32 [4, 4]", 1), *base(2, names="b"), *base(1, names="d")]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (base(2), "brought to this run .*: a.weight: bfloat16 .4, 4. with other values; b.weight: .*; c.weight: "),
        (MIXED, r"a.weight: bfloat16 \[4, 4\] <-> float32 \[4, 4\]; b.weight: bfloat16 \[4, 4\] with other values; "),
        (MIXED, r"c.weight: bfloat16 \[4, 4\] <-> absent and 1 more\. Load the same"),
        (base(1, names="ab"), r"caller's\): c.weight: bfloat16 \[4, 4\] <-> absent\. "),
        (base(2), r'Load the same base in the same dtype; or, .* join\(\.\.\., frozen="any"\)'),
    ],
)
def test_another_base_is_refused_and_the_first_differences_are_named(rig, theirs, words) -> None:
    joined(rig, "a", SAME)
    joined(rig, "b", SAME)
    with pytest.raises(FrozenMismatch, match=f"those that a has .*{words}"):
        rig.shard.join("c", asking(MODEL, frozen=tuple(theirs)), 0.0)


@pytest.mark.parametrize(
    "there",
    [
        [("any", []), ("a", SAME), ("any too", [])],  # who allows differences is not compared and binds nobody
        [("a", UNKNOWN), ("b", SAME), ("c", UNKNOWN)],  # resumed learners: training may have changed their buffers
        [("a", SAME), ("a", SAME)],  # who comes back is compared with itself
    ],
    ids=["any", "without a checksum", "again"],
)
def test_who_allows_differences_is_not_compared_and_binds_nobody(rig: Rig, there: list[tuple[str, Any]]) -> None:
    for learner_id, frozen in there:
        joined(rig, learner_id, frozen)
    refused(rig, base(2))
    refused(rig, base(1, form="float32 [4, 4]"))


def test_while_nothing_is_trained_a_learner_that_has_gone_binds_nobody(rig: Rig) -> None:
    """Also after a restart of the shard: who came first with the wrong base is refused elsewhere, and leaves."""
    joined(rig, "wrong", base(2))
    rig.seed("wrong")
    rig.shard.leave(rig.members["wrong"])
    joined(rig, "right", SAME)
    refused(rig, base(2))


def test_what_a_version_was_trained_with_binds_also_when_everybody_has_gone(rig: Rig) -> None:
    joined(rig, "a", SAME)
    rig.seed("a")
    rig.step("a", steps=4)
    rig.contribute("a", 1)
    assert rig.state.version == 1
    rig.shard.leave(rig.members["a"])
    refused(rig, base(2))
    joined(rig, "b", SAME)
