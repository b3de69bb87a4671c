"""The law of benchmarks/growth.py: a law that made the figures is found again, and no cost is below zero."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("growth")


def cases(growth: Any, cpu_s: Any) -> list[Any]:
    """Of one shard, whose CPU seconds are a function of fragments, contributions, parameters and bytes."""
    sizes = [(n, p, m * 1_000_000) for n in (1, 16, 256) for p in (1, 8, 64) for m in (1, 8)]
    return [growth.Cost(n, p, m, cpu_s=[cpu_s(p, n * p, m, 3.0 * n * m)], moved_bytes=3.0 * n * m) for n, p, m in sizes]


def test_the_law_that_made_the_cpu_seconds_is_found_again(growth: Any) -> None:
    true = [0.002, 0.001, 5e-9, 1e-9]
    made = cases(growth, lambda *terms: sum(a * b for a, b in zip(true, terms, strict=True)))
    assert growth.law(made) == pytest.approx(true)
