"""The simulation can fail: it finds each of these broken guards, by the invariant that is meant for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from mutants import MUTANTS, replaced

from diloco_simulator.cluster import ScheduleFailed, run_schedule
from diloco_simulator.invariants import Violation
from diloco_simulator.options import Options, draw_memory, draw_short

WELL = "well_again_after_faults"
# mutant, seeds within which it must be found, invariants that may find it
KILLED = [
    ("fence_nobody", range(70, 100), {"only_current_generations_are_merged"}),
    ("let_everybody_speak", range(30), {WELL}),
    ("accept_late", range(30), {"belief_is_true", "nothing_carried_is_merged"}),
    ("merge_twice", range(10), {"merged_at_most_once", "only_current_generations_are_merged"}),
    ("announce_before_computing", range(10), {"announced_versions_are_there"}),
    ("take_every_seed", range(30), {"names_are_given_once", "rounds_make_the_next_version"}),
    ("wait_for_all", range(10), {"nobody_delays_a_round_beyond_its_grace"}),
    ("wait_for_the_dead", range(40), {WELL}),
    ("stop_whoever_joins_again", range(20), {"superseded_only_by_another"}),
    ("carry_although_merged", range(10), {"belief_is_true"}),
    ("ignore_merged_version", range(10), {"belief_is_true"}),
    ("drop_what_was_not_merged", range(30), {"tokens_add_up", "progress_is_kept"}),
    ("never_give_back", range(40), {WELL}),
    ("count_the_snapshot_twice", range(10), {"progress_is_kept"}),
    ("forget_what_encoding_lost", range(20), {"contribution_is_what_was_trained"}),
    ("keep_what_a_shard_forgot", range(20, 60), {WELL}),
    ("add_changes_to_anything", range(30), {"anchors_are_published_values"}),
    ("forget_without_a_trace", range(60, 140), {"belief_is_true"}),
    ("push_to_any_life", range(60), {"only_current_generations_are_merged"}),
    ("announce_before_saving", range(30), {"announced_versions_survive", "recovered_versions_are_what_they_were"}),
    ("skip_the_sync_of_files", range(30), {"announced_versions_survive", "damage_has_a_cause"}),
    ("skip_the_sync_of_names", range(30), {"announced_versions_survive", "names_are_given_once"}),
    ("rename_before_sync", range(100), {"damage_has_a_cause"}),
    ("reuse_an_epoch", range(30), {"names_are_given_once", "only_current_generations_are_merged", WELL}),
    ("forget_what_was_merged", range(60), {"belief_is_true"}),
    ("accept_damaged_files", range(60), {"recovered_versions_are_what_they_were", "damage_is_recognised"}),
    ("accept_damaged_tensors", range(60), {"recovered_versions_are_what_they_were", "damage_is_recognised"}),
    ("keep_the_old_name", range(60), {"announced_versions_survive"}),
    ("forget_what_is_held", range(100), {WELL}),
]


def hard_on_disks(seed: int, **changes: object) -> Options:
    """A short schedule in which shards crash, files are damaged, and little else goes wrong."""
    return replace(
        draw_short(seed),
        **{
            "disks": (True,) * 3,
            "interval_s": 0.0,
            "save_s": 0.1,
            "arithmetic": "numbers",
            "quorum": 1,
            "sync_every": 1,
        }
        | {"faults": ("crash shard", "crash shard", "hurt file"), "faults_from_s": 1.5, "faults_s": 5.0, "budget": 0}
        | changes,
    )


def forgetful(seed: int) -> Options:
    """A short schedule in which shards forget at once who has no lease."""
    return replace(draw_short(seed), forgets=True, budget=0)


DISKS = dict.fromkeys([name for name, *_ in KILLED][-10:], hard_on_disks) | {
    "rename_before_sync": partial(hard_on_disks, faults=("crash shard",), save_s=0.3, fault_every_s=0.2),
    "accept_damaged_tensors": partial(hard_on_disks, arithmetic="tensors"),
    "forget_what_is_held": partial(hard_on_disks, interval_s=1.0, quorum="all"),
    "forget_without_a_trace": forgetful,
    "push_to_any_life": partial(hard_on_disks, faults=("crash shard", "hang learner"), fragments=6, fault_every_s=0.15),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_every_mutant_is_hunted() -> None:
    assert {name for name, *_ in KILLED} == MUTANTS.keys()


@pytest.mark.filterwarnings("ignore:coroutine")  # a schedule that failed leaves some that never began
@pytest.mark.parametrize(("mutant", "seeds", "finders"), KILLED, ids=[name for name, *_ in KILLED])
def test_the_simulation_finds_a_broken_guard(mutant: str, seeds: range, finders: set[str]) -> None:
    found = next(_violations(mutant, seeds), None)

    assert found is not None, f"{len(seeds)} schedules went well with {mutant}"
    assert found.name in finders, found


def _violations(mutant: str, seeds: range) -> Iterator[Violation]:
    """Where a broken guard lets something crash before an invariant looks at it, the next schedule is tried."""
    draw = DISKS.get(mutant, draw_memory)
    for seed in seeds:
        try:
            with replaced(*MUTANTS[mutant]):
                run_schedule(draw(seed))
        except ScheduleFailed as failed:
            if isinstance(failed.violation, Violation):
                yield failed.violation
