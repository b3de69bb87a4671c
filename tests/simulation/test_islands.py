"""Islands in simulated clusters: ranks die, other numbers of them come back, and all promises are kept."""

from __future__ import annotations

from collections import Counter

import pytest
import schedules

from diloco_simulator.cluster import run_schedule
from diloco_simulator.options import draw_islands
from diloco_simulator.verify.invariants import Violation, superseded_only_by_another
from diloco_worker.core.agreement import REFUSALS_MAX

SEEDS = (0, 6, 34, 42, 122, 305, *range(330, 340))
"""Those that found something while this was built, and others."""


def test_islands_keep_all_promises_while_their_ranks_die() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts.update(run_schedule(draw_islands(seed)).counts)
    assert counts["ranks lost"] >= len(SEEDS) // 2
    assert counts["learned that merged"] > 10 * len(SEEDS), "schedules in which islands are not merged show nothing"
    assert counts["learned that carried"] > len(SEEDS)


@pytest.mark.parametrize("seed", [19, 32, 41])
def test_what_is_not_finite_at_one_rank_gets_into_no_model_where_shards_forget(seed: int) -> None:
    """Its work was taken for work that a version may hold, and came off the model, NaN with it."""
    run_schedule(schedules.forgetting_ranks(seed))


@pytest.mark.parametrize("seed", [1, 3, 27, 85, 110])
def test_rounds_go_on_after_ranks_were_not_finite_again_and_again(seed: int) -> None:
    """A round that had opened again waited for ever for an island that was answered about an earlier contribution.

    110: such an answer took the place of a refusal that the island had not read yet.
    """
    run_schedule(schedules.diverging_ranks(seed))


def test_a_late_copy_of_what_was_refused_is_no_conflict() -> None:
    run_schedule(schedules.forgetting_ranks(4))
    run_schedule(schedules.diverging_ranks(37))


def test_an_island_begins_where_its_shard_comes_back_with_versions_of_the_same_names() -> None:
    """That the one before was dropped ended the pull of the version that came back, and the island joined for ever."""
    run_schedule(draw_islands(3141616))


def test_schedules_have_islands_beside_single_processes() -> None:
    drawn = [draw_islands(seed) for seed in range(200)]
    assert any(options.islands < options.learners for options in drawn)
    assert any(options.islands == options.learners > 1 for options in drawn)
    assert all("lose rank" in options.faults for options in drawn)


def test_a_learner_may_give_up_where_its_contributions_were_made_to_hold_nan_often_enough() -> None:
    superseded_only_by_another("a", "NOT_FINITE", 1, REFUSALS_MAX)
    with pytest.raises(Violation, match="gave up: NOT_FINITE"):
        superseded_only_by_another("a", "NOT_FINITE", 2, REFUSALS_MAX - 1)


def test_nothing_else_becomes_legal_by_that() -> None:
    superseded_only_by_another("a", "SUPERSEDED", 2, 0)
    with pytest.raises(Violation, match="gave up: SUPERSEDED"):
        superseded_only_by_another("a", "SUPERSEDED", 1, REFUSALS_MAX)
