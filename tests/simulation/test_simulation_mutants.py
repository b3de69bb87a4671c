"""The simulation can fail: it finds each of these broken guards of the product, by what is meant to find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import pytest
import schedules
from mutants import MUTANTS, broken_by

from diloco_simulator.options import Options, draw_islands, draw_options, draw_short

WELL = "well_again_after_faults"
ASSERTED = "AssertionError"
"""The product's own core refuses to go on."""
# mutant, how schedules are drawn, seeds within which it must be found, what may find it
KILLED: list[tuple[str, Callable[[int], Options], range, set[str]]] = [
    ("fence_nobody", schedules.evicting, range(40), {"fencing"}),
    ("let_everybody_speak", draw_options, range(30), {"double_counted", WELL}),
    ("accept_late", draw_options, range(30), {"double_counted", "accounting"}),
    ("merge_twice", draw_options, range(10), {"double_counted"}),
    ("announce_before_computing", draw_options, range(10), {"announced_versions_are_there"}),
    ("take_every_seed", draw_short, range(10), {ASSERTED}),
    ("wait_for_all", draw_options, range(20), {"nobody_delays_a_round_beyond_its_grace"}),
    ("wait_for_the_overdue_in_every_round", draw_short, range(400, 440), {"nobody_is_waited_for_again_and_again"}),
    ("wait_for_the_dead", draw_options, range(30), {WELL, "no_round_stands_still"}),
    ("stop_whoever_joins_again", draw_short, range(20), {"superseded_only_by_another"}),
    ("carry_although_merged", draw_options, range(10), {"double_counted"}),
    ("ignore_merged_version", draw_options, range(20), {"work_lost"}),
    ("never_give_back", draw_options, range(40), {"refusals_are_heard"}),
    ("count_the_snapshot_twice", draw_options, range(20), {"progress_is_kept"}),
    ("forget_what_encoding_lost", draw_options, range(20), {"error_feedback_is_whole"}),
    ("keep_the_loss_of_what_was_not_merged", schedules.late, range(10), {"error_feedback_is_whole"}),
    ("keep_what_a_shard_forgot", schedules.without_disks, range(20), {WELL}),
    ("add_changes_to_anything", draw_short, range(100, 200), {"differing_bytes", WELL}),
    ("push_to_any_epoch", schedules.killed_and_hanging, range(60), {"double_counted", ASSERTED}),
    ("forget_without_a_trace", schedules.forgetful, range(20, 160), {"double_counted"}),
    ("announce_before_saving", schedules.hard_on_disks, range(40), {"lost_versions", "work_lost"}),
    ("skip_the_sync_of_files", schedules.hard_on_disks, range(20), {"damage_has_a_cause"}),
    ("skip_the_sync_of_names", schedules.hard_on_disks, range(20), {"work_lost", "differing_bytes", "lost_versions"}),
    ("forget_what_was_merged", schedules.hard_on_disks, range(40), {"double_counted"}),
    ("accept_damaged_files", schedules.hard_on_disks, range(40, 200), {"differing_bytes", WELL}),
    ("keep_the_old_name", schedules.hard_on_disks, range(30), {"lost_versions_are_noticed"}),
    ("begin_every_folder_at_epoch_1", schedules.emptied, range(20), {"differing_bytes"}),
    ("answer_refusals_as_if_taken", draw_options, range(40), {WELL}),
    ("keep_quiet_about_values_that_are_not_finite", schedules.diverging, range(20), {WELL}),
    ("compute_the_record_again", schedules.replacing, range(10), {"double_counted"}),
    ("contribute_the_checkpoint_again", schedules.resuming, range(20), {"accounting"}),
    ("weigh_as_claimed", schedules.claiming, range(10), {"nobody_outweighs_a_round"}),
    ("take_any_length", schedules.twisting, range(40), {"a_minority_moves_nothing"}),
    ("let_one_stranger_open_rounds", schedules.hasty, range(10), {"rounds_follow_honest_steps"}),
    ("cut_all_to_the_shortest", draw_options, range(20), {"only_the_longest_is_cut"}),
    ("merge_half_of_a_round", draw_options, range(20), {"exactly_the_left_out_are_not_merged"}),
    ("let_one_learner_take_all_places", schedules.crowding, range(20, 60), {"honest_pushes_find_a_place", WELL}),
    ("forget_values_that_were_never_sent", schedules.forgetting_divergence, range(60), {"progress_is_kept"}),
    ("take_half_for_the_whole", schedules.losing_ranks, range(10), {"contributions_are_whole", ASSERTED, "NotFinite"}),
    ("keep_parts_of_who_is_gone", schedules.forgetting_ranks, range(20), {"halves_are_bounded"}),
    ("take_any_refusal_for_that_of_this_one", schedules.diverging_ranks, range(1, 40), {"double_counted"}),
    ("act_on_own_words", draw_islands, range(10), {"ranks_decide_alike"}),
    ("save_what_is_counted_so_far", schedules.losing_ranks, range(5), {"checkpoints_count_what_they_hold"}),
]

KEPT = {
    "accept_damaged_files": 41, "accept_late": 7, "add_changes_to_anything": 153, "announce_before_saving": 7,
    "answer_refusals_as_if_taken": 5, "count_the_snapshot_twice": 2, "cut_all_to_the_shortest": 3, "fence_nobody": 6,
    "forget_what_encoding_lost": 1, "forget_what_was_merged": 13,
    "forget_values_that_were_never_sent": 8, "ignore_merged_version": 10, "keep_what_a_shard_forgot": 2,
    "keep_parts_of_who_is_gone": 13, "let_everybody_speak": 4, "let_one_learner_take_all_places": 39,
    "merge_half_of_a_round": 3, "never_give_back": 7, "push_to_any_epoch": 3, "skip_the_sync_of_names": 3,
    "stop_whoever_joins_again": 5,
    "take_any_length": 1, "take_any_refusal_for_that_of_this_one": 2, "wait_for_the_dead": 12,
    "wait_for_the_overdue_in_every_round": 403,
}  # fmt: skip
"""The seed that has found a mutant, where it is not the first of its row."""
SLOW = {"let_one_learner_take_all_places"}
"""Its schedule takes seconds: in `make mutants`."""


def test_every_mutant_is_hunted() -> None:
    assert {name for name, *_ in KILLED} == MUTANTS.keys()


def of_each(test: Callable[..., None]) -> Callable[..., None]:
    """A test of every mutant; a schedule that failed leaves coroutines that never began."""
    rows = [pytest.param(*row, id=row[0], marks=[pytest.mark.gate] * (row[0] in SLOW)) for row in KILLED]
    each = pytest.mark.parametrize(("mutant", "draw", "seeds", "finders"), rows)
    ignored = ("ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning")
    return each(pytest.mark.filterwarnings(*ignored)(test))


@of_each
def test_the_schedule_that_was_kept_finds_a_broken_guard(
    mutant: str, draw: Callable[[int], Options], seeds: range, finders: set[str]
) -> None:
    """Where schedules are drawn otherwise than they were, keep the seed that the sweep prints: `pytest -m gate -rP`."""
    assert {name for _, name in _found(mutant, draw, [KEPT.get(mutant, seeds.start)])} & finders


@pytest.mark.gate
@of_each
def test_the_simulation_finds_a_broken_guard(
    mutant: str, draw: Callable[[int], Options], seeds: range, finders: set[str]
) -> None:
    """Something else may stumble over the damage first: of the first three finds, one is the right one."""
    found: list[str] = []
    for seed, name in islice(_found(mutant, draw, seeds), 3):
        found.append(name)
        if name in finders:
            print(f"{mutant}: seed {seed}")
            return

    pytest.fail(f"{len(seeds)} schedules with {mutant} found {found or 'nothing'}")


def _found(mutant: str, draw: Callable[[int], Options], seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    for seed in seeds:
        if (broken := broken_by(MUTANTS[mutant], draw(seed))) is not None:
            yield seed, broken
