"""The product in virtual time: schedules of faults, the same every time, judged by their histories and invariants."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import schedules

import forks
from diloco_simulator.__main__ import main, run_seeds
from diloco_simulator.cluster import ScheduleFailed, SimulatedCluster, run_schedule
from diloco_simulator.lies import SPOILS
from diloco_simulator.options import (
    DISK_FAULTS,
    FAULTS,
    MANY,
    Options,
    draw,
    draw_companions,
    draw_memory,
    draw_options,
    draw_short,
)

SCHEDULES = 150
CHUNK = 10
"""Of them and of the short ones, so many are in `make test`; CI and `make simulate` run more of the latter."""
DRAWN = 1000
REGRESSIONS = [
    line.split()[0]
    for line in (Path(__file__).parent / "regressions.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[pytest.mark.gate] * bool(first)) for first in range(0, SCHEDULES, CHUNK)],
)
def test_every_invariant_holds_in_every_schedule(first: int) -> None:
    drawn = [draw_options(seed) for seed in range(first, first + CHUNK)]
    versions = sum(run_schedule(options).counts.get("versions", 0) for options in drawn)

    assert versions > CHUNK, "schedules in which nothing is merged show nothing"


def test_every_invariant_holds_in_every_short_schedule() -> None:
    """Fault 25: CI runs a hundred by the command, and `make simulate` ten thousand."""
    tally = run_seeds("short", range(CHUNK))

    assert not tally.failures, next(iter(tally.failures.values()))
    assert tally.counts["versions"] > 6 * CHUNK, "two versions of each of three fragments, on average"


@pytest.mark.parametrize(
    "seeds", [range(20, 21), pytest.param(range(20, 60), marks=pytest.mark.gate)], ids=["quick", "more"]
)
def test_a_learner_that_its_shard_forgot_counts_nothing_twice(seeds: range) -> None:
    counts = (run_schedule(schedules.forgetful(seed)).counts for seed in seeds)

    assert sum(c.get("learned that forgotten", 0) for c in counts) > len(seeds)


@pytest.mark.parametrize(
    ("draw_one", "comes_about"),
    [
        (schedules.resuming, "learners resumed"),
        (schedules.emptied, "versions"),
        (schedules.diverging, "learned that carried"),
        (schedules.lossy, "contributions merged"),
        (schedules.slow_codec, "contributions merged"),
        (schedules.replacing, "learned that merged"),
    ],
    ids=["resumed", "emptied", "not finite", "lossy", "slow snapshots", "replaced"],
)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 10), marks=pytest.mark.gate)], ids=["quick", "more"])
def test_what_is_rare_in_drawn_schedules_is_tried_on_its_own(
    draw_one: Callable[[int], Options], comes_about: str, seeds: range
) -> None:
    assert sum(run_schedule(draw_one(seed)).counts.get(comes_about, 0) for seed in seeds) > 0


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 15), marks=pytest.mark.gate)], ids=["quick", "more"])
def test_who_leaves_with_warning_leaves_nothing_behind(seeds: range) -> None:
    counts = [run_schedule(schedules.leaving(seed)).counts for seed in seeds]

    assert sum(c.get("left with everything merged", 0) for c in counts) > 3 * len(seeds)
    assert sum(c.get("left with something", 0) for c in counts) == 0


@pytest.mark.gate
def test_leaving_counts_nothing_twice_whatever_goes_wrong() -> None:
    others = ("crash shard", "cut", "break calls", "freeze learner")
    counts = [run_schedule(schedules.leaving(seed, *others)).counts for seed in range(15)]

    assert sum(c.get("left with everything merged", 0) for c in counts) > 15


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_was_found_once_stays_fixed(name: str) -> None:
    run_schedule(draw(name))


def test_the_schedules_cover_every_kind_of_fault_and_setting() -> None:
    drawn = [draw_options(seed) for seed in range(DRAWN)]

    assert {kind for options in drawn for kind in options.faults} == {*FAULTS, *DISK_FAULTS, "warn learner"}
    assert {options.quorum for options in drawn} == {1, 2, "all"}
    assert {options.push for options in drawn} == {"float32", "int8"}
    assert {options.pull for options in drawn} == {"float32", "bfloat16", "int8", "int4"}
    assert {(options.shards, options.learners) for options in drawn} == {(s, m) for s in (1, 2, 3) for m in range(1, 6)}


def test_short_schedules_are_of_3_shards_and_5_learners_and_meet_every_fault() -> None:
    drawn = [o for seed in range(DRAWN) if (o := draw_short(seed)).sickness is None]

    usual, many = {(3, 5, 3), (3, 5, 4)}, {(2, 2, MANY)}
    assert {(o.shards, o.learners, o.fragments) for o in drawn} == usual | many
    assert {kind for options in drawn for kind in options.faults} == {
        *FAULTS,
        *DISK_FAULTS,
        "warn learner",
        "lose rank",
    }
    assert {options.max_pushes for options in drawn} == {1, 2, 64}
    assert {options.resumes > 0 for options in drawn} == {True, False}
    assert {options.pull for options in drawn} == {"float32", "bfloat16", "int8", "int4"}


def test_some_short_schedules_have_a_sick_member_of_several() -> None:
    drawn = [o for seed in range(2 * DRAWN) if (o := draw_short(seed)).sickness is not None]

    assert 0.03 < len(drawn) / (2 * DRAWN) < 0.1
    assert {o.sickness.how for o in drawn if o.sickness} == {*SPOILS}
    assert {o.learners for o in drawn} == {2, 3, 4, 5, 18}
    assert not any(o.hostile or o.islands or o.companions_every or o.has_buffer for o in drawn)


@pytest.mark.parametrize("seeds", [[12], pytest.param(range(100), marks=pytest.mark.gate)], ids=["quick", "more"])
@pytest.mark.timeout(900)  # five minutes of a core
def test_a_sick_member_is_left_out_until_it_is_healed_and_nobody_else_is(seeds: Sequence[int]) -> None:
    counts = [run_schedule(draw(f"sick:{seed}")).counts for seed in seeds]

    assert sum(c.get("learners left out", 0) for c in counts) > 0
    assert sum(c.get("learners that take part again", 0) for c in counts) > 0


def test_processes_come_to_the_same_as_one() -> None:
    one, two = (
        forks.run("diloco_simulator", "--schedules", "3", "--jobs", jobs, environment=os.environ).stdout
        for jobs in "12"
    )

    assert one.startswith("3 short schedules in ")
    assert one.split("violations; ")[1] == two.split("violations; ")[1]


def test_a_violation_ends_the_command_with_its_replay_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("diloco_simulator.verify.invariants.TOLERANCE", -1.0)

    assert main(["--schedules", "2", "--seed", "7"]) == 1
    assert "replay: python -m diloco_simulator --replay short:7\n" in capsys.readouterr().out
    assert main(["--replay", "short:7"]) == 1


@pytest.mark.gate
@pytest.mark.timeout(900)  # three minutes of a core
def test_50_seeds_give_the_same_traces_in_every_process_and_python(repository: Path) -> None:
    """Fault 25: a failing seed replays. Another process has other hashes and other addresses of objects."""
    traces = [_traces(repository, python, hash_seed, 25) for python, hash_seed in zip(_pythons(), "12", strict=False)]

    assert traces[0] == traces[1]
    assert len(set(traces[0])) == 50


def test_a_few_seeds_give_the_same_traces_in_two_processes(repository: Path) -> None:
    traces = [_traces(repository, sys.executable, hash_seed, 1) for hash_seed in "12"]

    assert traces[0] == traces[1]
    assert len(set(traces[0])) == 3


@pytest.mark.parametrize(
    ("options", "name", "replay"),
    [
        (draw_options(0), "long:0", "python -m diloco_simulator --replay long:0"),
        (schedules.late(3), "short:3", "run_schedule(short:3 with the options above)"),
    ],
    ids=["drawn", "changed by a test"],
)
def test_a_failure_names_its_seed_its_options_and_how_to_replay_it(
    options: Options, name: str, replay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_simulator.verify.invariants.TOLERANCE", -1.0)

    with pytest.raises(ScheduleFailed) as failed:
        run_schedule(options)

    lines = str(failed.value).splitlines()
    assert lines[0].startswith(f"{name}: Violation ")
    assert repr(options) in lines[1]
    assert lines[2] == f"the last {len(lines) - 4} events:"
    assert lines[-1] == f"replay: {replay}"


def _pythons() -> list[str]:
    """Two interpreters to run the simulator with: another version, if there is one that has what it needs."""
    others = (shutil.which(f"python3.{minor}") for minor in (14, 13, 12) if minor != sys.version_info.minor)
    able = [python for python in others if python and _runs(python, "import torch, grpc, pydantic, google_crc32c")]
    return [sys.executable, (able or [sys.executable])[0]]


def _runs(python: str, code: str) -> bool:
    return subprocess.run([python, "-c", code], capture_output=True, timeout=280).returncode == 0


def _traces(repository: Path, python: str, hash_seed: str, seeds: int) -> list[str]:
    """Of so many schedules of each family."""
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from diloco_simulator.cluster import run_schedule\n"
        "from diloco_simulator.options import draw\n"
        "for family in ('short', 'long'):\n"
        f"    for seed in range({seeds}):\n"
        "        print(run_schedule(draw(f'{family}:{seed}')).trace)\n"
        "print(run_schedule(draw('short:11')).trace)"  # an island's tasks are cancelled together
    )
    elsewhere = {"PYTHONMALLOC": "malloc"} if hash_seed == "2" else {}
    path = os.pathsep.join(str(repository / root) for root in ("protos", "common", "server", "worker", "simulator"))
    done = subprocess.run(
        [python, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": hash_seed} | elsewhere,
        capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize("options", [draw_memory(60), schedules.slow_codec(9)], ids=["comes back", "together"])
def test_of_two_processes_with_one_id_the_later_ends_up_with_all_shards(options: Options) -> None:
    """Each held one shard of two for ever."""
    run_schedule(options)


@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 60), marks=pytest.mark.gate)], ids=["quick", "more"]
)
def test_companions_keep_all_promises_while_everything_fails(seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts.update(run_schedule(draw_companions(seed)).counts)
    assert counts["learned that merged"] > 10 * len(seeds)
    assert counts["recoveries"] > len(seeds) / 10


def test_schedules_make_versions_of_companions_and_of_the_model() -> None:
    cluster = SimulatedCluster(draw_companions(1))
    try:
        cluster.run()
        states = [s for shard in cluster.shards.values() if shard.host for s in shard.host.shard.fragments.values()]
        for is_companion in (False, True):
            assert any(s.version > 0 for s in states if s.fragment.traits.is_of_model != is_companion)
    finally:
        cluster.bury()
