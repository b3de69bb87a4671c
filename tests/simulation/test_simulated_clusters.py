"""Whole clusters in virtual time: 1000 schedules of faults, the same every time, and all invariants at every step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco_simulator.cli import main
from diloco_simulator.cluster import ScheduleFailed, run_schedule
from diloco_simulator.options import DISK_FAULTS, FAULTS, draw, draw_options, draw_short
from diloco_simulator.runner import run_seeds

SCHEDULES = 1000
SHORT_SCHEDULES = 200
CHUNK = 100
REGRESSIONS = [
    line.split()[0]
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


@pytest.mark.parametrize("first", range(0, SHORT_SCHEDULES, CHUNK))
def test_every_invariant_holds_in_every_short_schedule(first: int) -> None:
    """Fault 25: the command that CI runs does ten thousand."""
    tally = run_seeds("short", range(first, first + CHUNK))

    assert not tally.failures, next(iter(tally.failures.values()))
    assert tally.counts["versions"] > 6 * CHUNK, "two versions of each of three fragments, in the mean"


def test_a_learner_that_its_shard_forgot_counts_nothing_twice() -> None:
    schedules = (replace(draw_short(seed), forgets=True, budget=0) for seed in range(CHUNK))

    assert sum(run_schedule(options).counts.get("learned that forgotten", 0) for options in schedules) > 0


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_was_found_once_stays_fixed(name: str) -> None:
    run_schedule(draw(name))


def test_the_schedules_cover_every_kind_of_fault_and_setting() -> None:
    drawn = [draw_options(seed) for seed in range(SCHEDULES)]

    assert {kind for options in drawn for kind in options.faults} == {*FAULTS, *DISK_FAULTS}
    assert {options.quorum for options in drawn} == {1, 2, "all"}
    assert {options.on_commit for options in drawn} == {"carry", "overwrite", "blend"}
    assert {options.push for options in drawn} == {"float32", "int8"}
    assert {options.pull for options in drawn} == {"float32", "bfloat16", "int8", "int4"}
    assert {(options.shards, options.learners) for options in drawn} == {(s, m) for s in (1, 2, 3) for m in range(1, 6)}


def test_short_schedules_are_of_3_shards_and_5_learners_and_meet_every_fault() -> None:
    drawn = [draw_short(seed) for seed in range(SCHEDULES)]

    assert {(options.shards, options.learners) for options in drawn} == {(3, 5)}
    assert {kind for options in drawn for kind in options.faults} == {*FAULTS, *DISK_FAULTS}
    assert {options.arithmetic for options in drawn} == {"tensors", "numbers"}
    assert {options.pull for options in drawn} == {"float32", "bfloat16", "int8", "int4"}


def test_processes_come_to_the_same_as_one(repository: Path) -> None:
    one, two = (_command(repository, "--schedules", "60", "--jobs", jobs) for jobs in ("1", "2"))

    assert one.startswith("60 short schedules in ")
    assert one.split("violations; ")[1] == two.split("violations; ")[1]


def test_the_report_says_how_much_happens_in_the_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    """So that nobody takes 10 000 schedules in which nothing happens for a proof."""
    assert main(["--schedules", "60"]) == 0

    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("in 1000 of them: "))
    for what in ("faults", "shards crashed", "recoveries from disk", "versions", "contributions merged"):
        assert re.search(rf"[1-9]\d+ {what}", line), line


def test_a_violation_ends_the_command_with_its_replay_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("diloco_simulator.invariants.TOLERANCE", -1.0)

    assert main(["--schedules", "2", "--seed", "7"]) == 1
    assert "replay: python -m diloco_simulator --replay short:7\n" in capsys.readouterr().out
    assert main(["--replay", "short:7"]) == 1


def test_a_name_of_no_schedule_is_told_how_to_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--replay", "78"])

    assert ended.value.code == 2
    assert "say long:SEED or memory:SEED or short:SEED" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["long", "short"])
def test_a_seed_gives_the_same_trace_every_time(family: str) -> None:
    """Fault 25: a failing seed replays."""
    twice = [[run_schedule(draw(f"{family}:{seed}")).trace for seed in range(5)] for _ in range(2)]

    assert twice[0] == twice[1]
    assert len(set(twice[0])) == 5


def test_a_seed_gives_the_same_trace_in_every_process(repository: Path) -> None:
    traces = [_replay(repository, name="long:3", hash_seed=hash_seed) for hash_seed in ("1", "2")]

    assert traces[0] == traces[1]
    assert "trace " in traces[0]


def test_a_failure_names_its_seed_its_options_and_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_simulator.invariants.TOLERANCE", -1.0)
    options = draw_options(0)

    with pytest.raises(ScheduleFailed) as failed:
        run_schedule(options)

    lines = str(failed.value).splitlines()
    assert lines[0].startswith("long:0: Violation ")
    assert repr(options) in lines[1]
    assert lines[2] == f"the last {len(lines) - 4} events:"
    assert lines[-1] == "replay: python -m diloco_simulator --replay long:0"


def _replay(repository: Path, name: str, hash_seed: str) -> str:
    return _command(repository, "--replay", name, PYTHONHASHSEED=hash_seed)


def _command(repository: Path, *arguments: str, **environment: str) -> str:
    """What the command says."""
    path = os.pathsep.join(str(repository / root) for root in ("protos", "common", "server", "worker", "simulator"))
    done = subprocess.run(
        [sys.executable, "-m", "diloco_simulator", *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return done.stdout
