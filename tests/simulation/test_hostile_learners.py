"""Hostile learners in simulated clusters: they are there, they do all that they can do, and the others keep theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import schedules

from diloco_simulator.cluster import SimulatedCluster, run_schedule
from diloco_simulator.lies import FOREIGN, MANNERS, TACTICS
from diloco_simulator.options import Options, draw_options, draw_short
from diloco_simulator.verify.judge import violations

SEEDS = 6
QUICK = pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, SEEDS), marks=pytest.mark.gate)], ids=["quick", "more"]
)
DRAWN = 1000


@pytest.mark.parametrize(
    "draw",
    [
        schedules.claiming, schedules.hasty, schedules.lingering, schedules.crowding, schedules.twisting,
        schedules.impersonating,
    ],
    ids=["claims", "steps", "step times", "open pushes", "payloads", "other identities"],
)  # fmt: skip
@QUICK
def test_honest_learners_keep_all_promises_beside_hostile_ones(draw: Callable[[int], Options], seeds: range) -> None:
    versions = sum(run_schedule(draw(seed)).counts["versions"] for seed in seeds)

    assert versions > len(seeds), "schedules in which nothing is merged show nothing"


@QUICK
def test_a_silent_learner_holds_up_no_round_that_all_others_have_lost(seeds: range) -> None:
    """P6. The others were refused, or have joined again since: nobody else can contribute to the round."""
    for seed in seeds:
        run_schedule(schedules.silent(seed))


@pytest.mark.parametrize("draw", [draw_short, draw_options])
def test_some_schedules_have_hostile_learners_and_most_have_none(draw: Callable[[int], Options]) -> None:
    drawn = [draw(seed) for seed in range(DRAWN)]
    hostile = [options for options in drawn if options.hostile]

    assert {options.hostile for options in drawn} == {0, 1, 2}
    assert 0.15 * DRAWN < len(hostile) < 0.35 * DRAWN
    assert {options.identities_proven for options in hostile} == {True, False}
    assert {tactic for options in hostile for tactic in options.tactics} == {*TACTICS, *FOREIGN}
    assert {manner for options in hostile for manner in options.manners} == {*MANNERS}
    assert not any({*FOREIGN} & {*options.tactics} for options in hostile if options.identities_proven)
    assert all(options.quorum in (1, 2) for options in hostile), "a round that waits for all waits for liars"


@pytest.mark.gate
def test_every_tactic_is_tried_and_some_lies_are_believed() -> None:
    counts = hostile_counts()

    assert {*TACTICS, *FOREIGN} <= {what.removeprefix("hostile: ") for what in counts}
    assert counts["hostile pushes: accepted"] > 20


@pytest.mark.gate
def test_hostile_learners_meet_most_refusals() -> None:
    counts = hostile_counts()
    of_pushes = {what.removeprefix("hostile pushes: ") for what in counts}
    of_calls = {what.removeprefix("refused: ") for what in counts}

    assert of_pushes >= {"late", "duplicate", "BAD_PAYLOAD", "NOT_FINITE", "WRONG_EPOCH", "WRONG_ROUND"}
    assert of_calls >= {"BAD_REQUEST", "NOT_JOINED", "MANIFEST_MISMATCH", "PROTOCOL_MISMATCH", "STALE_GENERATION"}


def test_whoever_has_proven_its_identity_can_use_no_other() -> None:
    """P10: nobody honest is a claimant where identities are proven."""
    cluster = SimulatedCluster(schedules.hostile(3, 2, tactics=(*TACTICS, *FOREIGN), identities_proven=True))
    cluster.run()

    accepted = {line["learner"] for shard in cluster.histories().shard_processes() for line in shard.of("joined")}
    assert accepted <= {"w0", "w1", "w2", "w3", "w4", "x0", "x1"}
    assert cluster.counts["refused: WRONG_IDENTITY"] > 0


def test_the_judge_finds_the_lies_where_it_takes_them_for_work() -> None:
    """What hostile learners say is a claim. Taken for work, it is work that nobody has done."""
    cluster = SimulatedCluster(schedules.hostile(2, tactics=("claim",)))
    cluster.run()
    histories = cluster.histories()

    assert violations(histories, claimants=cluster.claimants) == []
    assert {found.check for found in violations(histories)} == {"double_counted"}
    assert all(" x0 " in f"{found.what} " for found in violations(histories))


@cache
def hostile_counts() -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(30):
        counts.update(run_schedule(schedules.hostile(seed, 2, identities_proven=seed % 2 == 0)).counts)
    return counts
