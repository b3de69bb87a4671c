"""Whole clusters in virtual time: 1000 schedules of faults, the same every time, and all invariants at every step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco_simulator.cluster import ScheduleFailed, run_schedule
from diloco_simulator.options import FAULTS, draw_options

SCHEDULES = 1000
CHUNK = 100
REGRESSIONS = [
    int(line.split()[0])
    for line in (Path(__file__).parent / "regressions.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_every_invariant_holds_in_every_schedule(first: int) -> None:
    versions = sum(run_schedule(draw_options(seed)).counts.get("versions", 0) for seed in range(first, first + CHUNK))

    assert versions > CHUNK, "schedules in which nothing is merged show nothing"


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_was_found_once_stays_fixed(seed: int) -> None:
    run_schedule(draw_options(seed))


def test_the_schedules_cover_every_kind_of_fault_and_setting() -> None:
    drawn = [draw_options(seed) for seed in range(SCHEDULES)]

    assert {kind for options in drawn for kind in options.faults} == set(FAULTS)
    assert {options.quorum for options in drawn} == {1, 2, "all"}
    assert {options.on_commit for options in drawn} == {"carry", "overwrite", "blend"}
    assert {options.push for options in drawn} == {"float32", "int8"}
    assert {options.pull for options in drawn} == {"float32", "bfloat16", "int8", "int4"}
    assert {(options.shards, options.learners) for options in drawn} == {(s, m) for s in (1, 2, 3) for m in range(1, 6)}


def test_a_seed_gives_the_same_trace_every_time() -> None:
    twice = [[run_schedule(draw_options(seed)).trace for seed in range(5)] for _ in range(2)]

    assert twice[0] == twice[1]
    assert len(set(twice[0])) == 5


def test_a_seed_gives_the_same_trace_in_every_process(repository: Path) -> None:
    traces = [_replay(repository, seed=3, hash_seed=hash_seed) for hash_seed in ("1", "2")]

    assert traces[0] == traces[1]
    assert "trace " in traces[0]


def test_a_failure_names_its_seed_its_options_and_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_simulator.invariants.TOLERANCE", -1.0)
    options = draw_options(0)

    with pytest.raises(ScheduleFailed) as failed:
        run_schedule(options)

    lines = str(failed.value).splitlines()
    assert lines[0].startswith("seed 0: Violation ")
    assert repr(options) in lines[1]
    assert lines[2] == f"the last {len(lines) - 4} events:"
    assert lines[-1] == "replay: python -m diloco_simulator --replay 0"


def _replay(repository: Path, seed: int, hash_seed: str) -> str:
    """What the command says at its end, without how long it took."""
    path = os.pathsep.join(str(repository / root) for root in ("protos", "common", "server", "worker", "simulator"))
    done = subprocess.run(
        [sys.executable, "-m", "diloco_simulator", "--replay", str(seed)],
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return "\n".join(done.stdout.splitlines()[1:])
