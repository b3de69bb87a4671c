"""The plan of `diloco chaos`: the same seed makes the same plan, and a plan does what was asked for."""

from __future__ import annotations

import pytest

from diloco_deploy.chaos.plan import LINK, START_S, Fault, FaultKind, make_plan

SHARDS = ["shard-0", "shard-1"]
WORKERS = [f"worker-{i}" for i in range(8)]


def plan(seed: int = 1, seconds: float = 600.0, dead_share: float = 0.2, workers: list[str] = WORKERS, **other):
    given = {"every_s": 5.0, "shards": SHARDS, **other}
    return make_plan(seed=seed, seconds=seconds, dead_share=dead_share, workers=workers, **given)


def away_s(fault: Fault) -> float:
    return fault.for_s + (START_S if fault.kind is FaultKind.KILL else 0.0)


def test_a_plan_is_a_function_of_its_seed():
    assert plan(seed=1) == plan(seed=1)
    assert plan(seed=1) != plan(seed=2)


def test_a_known_seed_replays():
    """A seed that somebody reports must mean the same later on."""
    first = plan(seed=1, seconds=60.0)[:2]
    assert [(fault.at_s, fault.kind, fault.target) for fault in first] == [
        (1.04, FaultKind.FREEZE, "worker-3"),
        (7.48, FaultKind.KILL, "worker-2"),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_there_is_a_fault_in_nearly_every_interval(seed: int):
    faults = plan(seed)
    assert 114 <= len(faults) <= 120
    assert all(0.0 <= fault.at_s < 600.0 for fault in faults)
    intervals = [int(fault.at_s // 5.0) for fault in faults]
    assert len(set(intervals)) == len(intervals), "never two in one interval"
    assert intervals == sorted(intervals)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dead_share", [0.1, 0.2])
def test_workers_are_away_for_the_share_of_time_that_was_asked_for(seed: int, dead_share: float):
    to_workers = [fault for fault in plan(seed, dead_share=dead_share) if fault.target in WORKERS]
    dead_s = sum(min(away_s(fault), 600.0 - fault.at_s) for fault in to_workers)
    assert dead_s / (600.0 * len(WORKERS)) == pytest.approx(dead_share, rel=0.15)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_hurt_before_it_is_back_and_one_worker_is_always_well(seed: int):
    faults = plan(seed, workers=WORKERS[:3], dead_share=0.5)
    for index, fault in enumerate(faults):
        earlier = [f for f in faults[:index] if f.at_s + f.for_s > fault.at_s]
        assert fault.target not in {f.target for f in earlier}
        hurt = {f.target for f in [*earlier, fault] if f.target in WORKERS}
        assert len(hurt) < 3


@pytest.mark.parametrize("seed", range(5))
def test_shards_and_workers_are_killed_and_frozen(seed: int):
    hit = {(fault.kind, fault.target.partition("-")[0]) for fault in plan(seed)}
    assert hit == {(kind, role) for kind in (FaultKind.KILL, FaultKind.FREEZE) for role in ("shard", "worker")}


@pytest.mark.parametrize("seed", range(5))
def test_only_disks_of_shards_are_filled_and_only_where_asked_for(seed: int):
    filled = {fault.target for fault in plan(seed, disk_full=True) if fault.kind is FaultKind.FILL}
    assert filled == set(SHARDS)
    assert all(fault.kind is not FaultKind.FILL for fault in plan(seed))


@pytest.mark.parametrize("seed", range(5))
def test_links_are_cut_between_a_worker_and_a_shard_and_only_where_they_can_be(seed: int):
    cut = [fault for fault in plan(seed, links=True) if fault.kind is FaultKind.CUT]
    assert 4 <= len(cut) <= 24
    for fault in cut:
        worker, shard = fault.target.split(LINK)
        assert worker in WORKERS
        assert shard in SHARDS
        assert 1.0 <= fault.for_s <= 10.0
    assert all(fault.kind is not FaultKind.CUT for fault in plan(seed))


def test_without_time_there_are_no_faults():
    assert plan(seconds=2.0) == ()


def test_a_fault_reads_as_a_line():
    assert str(Fault(12.5, FaultKind.KILL, "worker-3", 8.25)) == "   12.5 s  kill    worker-3               for 8.2 s"
