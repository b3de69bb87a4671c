"""`diloco_chaos`: the plan is a function of the seed, and histories say how much work got through."""

from __future__ import annotations

from typing import Any

import pytest
from recorded import clean, find, histories, sent

from diloco_chaos.faults import ChaosRun, FaultKind, make_plan
from diloco_chaos.faults import InjectedFault as Hit
from diloco_chaos.result import longest_gaps, make_baseline, make_result, summary, work_of
from diloco_simulator.verify.histories import Histories, gather
from diloco_simulator.verify.judge import stood_still

SHARDS = ["shard-0", "shard-1"]
WORKERS = [f"worker-{i}" for i in range(8)]


def plan(seed: int = 1, seconds: float = 600.0, dead_share: float = 0.2, workers: list[str] = WORKERS, **other):
    given = {"every_s": 5.0, "shards": SHARDS, **other}
    return make_plan(seed=seed, seconds=seconds, dead_share=dead_share, workers=workers, **given)


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_hurt_before_it_is_back_and_one_worker_is_always_well(seed: int):
    faults = plan(seed, workers=WORKERS[:3], dead_share=0.5)
    for index, fault in enumerate(faults):
        earlier = [f for f in faults[:index] if f.at_s + f.for_s > fault.at_s]
        assert fault.target not in {f.target for f in earlier}
        hurt = {f.target for f in [*earlier, fault] if f.target in WORKERS}
        assert len(hurt) < 3


@pytest.mark.parametrize("seed", range(5))
def test_all_are_killed_and_frozen(seed: int):
    hit = {(fault.kind, fault.target.partition("-")[0]) for fault in plan(seed)}
    assert hit == {(kind, role) for kind in (FaultKind.KILL, FaultKind.FREEZE) for role in ("shard", "worker")}


def stepping(*times: float, born: float = 0.0) -> list[dict[str, Any]]:
    steps = ({"t": t, "what": "stepped", "tokens": 100 * n} for n, t in enumerate(times, 1))
    return [{"t": born, "what": "born", "role": "learner", "tokens": 0}, *steps]


def worker(*processes: list[dict[str, Any]]) -> Histories:
    return gather(("ann", lines) for lines in processes)


def injected(*faults: Hit) -> ChaosRun:
    return ChaosRun(0.0, 10.0, list(faults))


@pytest.mark.parametrize(
    ("times", "faults", "longest"),
    [
        ((1, 2, 3, 6, 7, 9), [], 3.0),
        ((1, 2, 3), [], 7.0),  # it lived to the end and stood still
        ((1, 2, 8, 9), [Hit("freeze", "ann", 2.5, 7.5)], 1.0),  # frozen is not standing still
        ((1, 2, 8, 9), [Hit("freeze", "ben", 2.5, 7.5)], 6.0),
    ],
)
def test_the_longest_gap_is_that_of_a_worker_that_could_have_stepped(times: Any, faults: list[Hit], longest: float):
    gaps = longest_gaps(worker(stepping(*times)), injected(*faults))
    assert gaps == [(pytest.approx(longest), "ann")]
    assert [violation.check for violation in stood_still(gaps, 2.9)] == (["stood_still"] if longest > 2.9 else [])


def test_goodput_counts_what_was_trained_in_the_measured_time_and_merged_at_last():
    lines = clean()
    work = work_of(histories(lines), ChaosRun(2.0, 6.0))
    assert work.tokens == 200, "steps 2 and 3; the version of the latter came after a crash, and would count if later"

    find(lines["shard-0"], "restored").update(version=2)
    assert work_of(histories(lines), ChaosRun(2.0, 6.0)).tokens == 100, "version 3 did not survive"


def test_every_violation_is_in_the_result():
    lines = clean()
    sent(lines, 2, since=0, tokens=200)
    calm = make_baseline(histories(clean()), ChaosRun(0.0, 8.0))
    ended = ChaosRun(0.0, 8.0, exits=["ann ended by itself"])
    result = make_result(histories(lines), ended, [], calm, seed=3, gap_max_s=3.1)
    assert (result["violations"], result["double_counted"], result["unplanned"]) == (2, 1, 1)
    assert "2 violations" in summary(result)
    assert "double_counted: 100 tokens of ann are in version 1 of fragment 0 (shard-0)" in summary(result)
