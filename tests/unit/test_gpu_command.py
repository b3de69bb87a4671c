"""`make gpu`: bounds that add up, files that tell what a run knew when it was cut off, and the page of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def gpu(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu/report.py."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks/gpu"))
    import report

    return report


def test_a_run_that_is_cut_off_has_told_what_it_knew(gpu: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    cases = ["first", "dies", "cut", "later"]

    record = gpu.Record(path, "cost", cases, {"card": "H100"})
    left = record.left()
    record.end(next(left), [gpu.judged("speed", ">= 99 %", True, "99.5 %")], 1.0)
    next(left)  # the process dies in it
    again = gpu.Record(path, "cost", cases, {"card": "H100"}).left()
    assert next(again) == "cut"  # the next process goes on behind it
    gpu.cut_off(path)

    assert [(row.name, row.result) for row in gpu.rows_of(json.loads(path.read_text()))] == [
        ("speed", "pass"), ("dies", "FAIL"), ("cut", "cut off"), ("later", "not reached"),
    ]  # fmt: skip
    assert "dies" in gpu.table(tmp_path)
