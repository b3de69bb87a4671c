"""Examples of ours with something wrong in them: how they are run, and what a person is told."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import forks
from processes import DEADLINE_S, environment, until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKS = 2
ALONE_S = 1.0
"""What torchrun would end at once gets so long to end by itself: so it can be read what it says."""
CODE = re.compile(r"\[([A-Z_]+)\]$")


@contextmanager
def as_examples_run() -> Iterator[pytest.MonkeyPatch]:
    """For a script in this process: it finds the other examples, and its hook for errors goes with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.__excepthook__)
        patch.syspath_prepend(EXAMPLES)
        yield patch


def changed(script: str, *changes: tuple[str, str]) -> str:
    """The script with these words in the place of those, each once."""
    for before, after in changes:
        assert script.count(before) >= 1, before
        script = script.replace(before, after, 1)
    return script


def before_step(script: str, line: str) -> str:
    """The script with something done after the optimizer's step."""
    step = "            learner.step("
    return changed(script, (step, f"            {line}\n{step}"))


def answer(stderr: str) -> list[str]:
    """What a person is told at the end: without the lines of the log, which begin with the time."""
    return [line for line in stderr.strip().splitlines() if not re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)]


def assert_told(said: str, code: str) -> None:
    """At most three lines, of which the first names the line of the script, and the last has the code."""
    told = answer(said)
    assert 1 <= len(told) <= 3, said
    assert re.match(r"diloco \(train.py, line \d+\): ", told[0]), said
    found = CODE.search(told[-1])
    assert found is not None, said
    assert found[1] == code, said


def run_ranks(script: Path, arguments: Sequence[str], folder: Path) -> list[str]:
    """Run a script as two ranks, as torchrun does, and return what each of them has said. None of them succeeds."""
    with forks.ranks(RANKS, _become_rank, script, list(arguments), folder, environment=environment()) as started:
        until(lambda: any(process.exitcode for process in started), "a rank ends")
        started[0].join(DEADLINE_S)
        for process in started:
            process.join(ALONE_S)
            process.terminate()
            process.join(ALONE_S)
        assert started[0].exitcode == 1
    return [(folder / f"rank-{rank}").read_text() for rank in range(RANKS)]


def _become_rank(environment: Mapping[str, str], script: Path, arguments: list[str], folder: Path) -> None:
    forks.log_to(folder / f"rank-{environment['RANK']}")
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(EXAMPLES))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
