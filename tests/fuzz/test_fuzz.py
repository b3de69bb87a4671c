"""A part of what `make fuzz` offers: no crash, no hang, no traceback, and every message answered with a stable code."""

from __future__ import annotations

from pathlib import Path

import pytest
import run
from fuzzing import Result

SEED = 20261122
COUNTS = {
    "answers": 600, "calls": 300, "http": 120, "messages": 400, "versions": 300, "manifests": 100,
}  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("part", COUNTS)
def test_everything_from_outside_is_answered_with_a_stable_code(part: str, tmp_path: Path) -> None:
    _, offer = run.parts(tmp_path)[part]
    result: Result = offer(SEED, range(COUNTS[part]))
    print(f"{result.offered} messages with seed {SEED}: {dict(result.answers)}")
    found = "\n".join(str(finding)[:2000] for finding in result.findings)
    assert not found, found
