"""Each program of the zoo for a few steps: one shard and two learners, and alone. `make zoo` is the long form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from zoo import PROGRAMS, ZOO, Program, by_itself, keep, preload

MOST_LINES = 80
MOST_ADDED = 9
STEPS = 24
SHORT = {"vision", "gan"}
"""In `make test`; the others in `make gate`."""
QUICK = {"sync.sync_every": 4, "sync.fragments": 2, "lease.heartbeat_s": 0.3}


@pytest.fixture(scope="module", autouse=True)
def _preloaded(request: pytest.FixtureRequest) -> None:
    here = [item for item in request.session.items if item.path == request.path and "program" in item.fixturenames]
    preload([item.callspec.params["program"] for item in here])


def test_programs_become_learners_by_a_few_lines() -> None:
    assert [program.name for program in ZOO if len(program.lines) > MOST_LINES] == []
    assert [program.name for program in ZOO if not 1 < program.added <= MOST_ADDED] == []


@pytest.mark.parametrize(
    "program",
    [pytest.param(one, id=one.name, marks=[pytest.mark.gate] * (one.name not in SHORT)) for one in ZOO],
)
def test_a_program_trains_as_a_learner(program: Program, tmp_path: Path) -> None:
    if not program.is_here:
        pytest.skip(f"NOT RUN: pip install {program.needs}")
    by_itself(program, tmp_path / "alone", 1, steps=2)

    found = keep(program, tmp_path / "run", steps=STEPS, learners=2, shards=1, kills=False, pace_s=0.0, settings=QUICK)

    # An untrained model is worth little, so what bfloat16 rounds away may be a percent of that.
    assert found.behind <= 0.05, found


def test_the_zoo_lists_all_its_programs() -> None:
    assert {program.path for program in ZOO} == set(PROGRAMS.glob("*.py"))
