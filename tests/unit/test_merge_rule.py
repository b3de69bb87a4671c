"""Which merge rule a run takes by what its learners train with, and that it keeps it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from diloco_common.wire.messages import ADAM, OTHER
from diloco_server.core.fragment import Restored
from diloco_server.core.ledger import MergeChosen, MergeStays
from rig import Rig


def run(*inner: str, merge: str = "auto", restored: Restored | None = None, model: Rig | None = None) -> Rig:
    """A shard whose learners have each said what they train with."""
    rig = Rig(sync={"merge": merge})
    if restored is not None:
        assert model is not None
        rig.shard.versions.restore(model.shard.manifest, [restored])  # type: ignore[arg-type]
    for number, said in enumerate(inner):
        rig.join(name := f"learner-{number}")
        rig.report(name, inner=said)
        rig.report(name, inner=said)  # again, as each of its reports does
    return rig


def rounds(rig: Rig, count: int = 1) -> Rig:
    names = [*rig.members]
    if not rig.state.seeded:
        rig.seed(names[0])
    for _ in range(count):
        rig.step(*names, steps=4)
        for name in names:
            rig.contribute(name, rig.state.version + 1 if name == names[0] else rig.state.round.round)  # type: ignore[union-attr]
    return rig


def kept(rig: Rig) -> Restored:
    record, values = deepcopy((rig.state.record, rig.state.values))
    return Restored(record, values, rig.state.published, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inner", "merge", "taken", "stays"),
    [
        ([ADAM, ADAM], "auto", "agreement", []),
        ([OTHER, OTHER], "auto", "mean", []),
        (["", ADAM], "auto", "agreement", []),  # the first that says it
        ([ADAM, OTHER], "auto", "agreement", ["learner-1"]),
        ([OTHER, ADAM], "auto", "mean", ["learner-1"]),
        (["", ""], "auto", "mean", []),  # nobody does
        ([ADAM, ADAM], "mean", "mean", []),
        ([OTHER, OTHER], "rda", "rda", []),
    ],
)
def test_the_first_learner_that_says_what_it_trains_with_decides(
    inner: list[str], merge: str, taken: str, stays: list[str]
) -> None:
    rig = rounds(run(*inner, merge=merge))

    assert rig.shard.versions.merge == taken
    assert rig.state.record.merge == (taken if merge == "auto" else "")
    assert [fact.merge for fact in rig.noted(MergeChosen)] == ([taken] if merge == "auto" else [])
    assert [fact.learner_id for fact in rig.noted(MergeStays)] == stays


@pytest.mark.parametrize(("merge", "theta"), [("auto", -0.5), ("mean", -1.0)])
def test_equal_contributions_of_adam_are_shortened_unless_the_settings_say_the_mean(merge: str, theta: float) -> None:
    assert rounds(run(ADAM, ADAM, merge=merge)).theta == [theta]


@pytest.mark.parametrize(("merge", "taken", "record"), [("auto", "agreement", "agreement"), ("mean", "mean", "")])
def test_a_shard_that_comes_back_goes_on_with_the_rule_of_its_run(merge: str, taken: str, record: str) -> None:
    before = rounds(run(ADAM))

    rig: Any = run(OTHER, merge=merge, restored=kept(before), model=before)
    rounds(rig)

    assert rig.shard.versions.merge == taken
    assert rig.state.record.merge == record
    assert not rig.noted(MergeChosen)
    assert [fact.learner_id for fact in rig.noted(MergeStays)] == (["learner-0"] if merge == "auto" else [])
