"""The laws of benchmarks/growth.py: a law that made the figures is found again, and no cost is below zero."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@dataclass
class Case:
    learners: int
    fragments: int
    parameters: int
    shard_cpu_s: list[float] = field(default_factory=lambda: [0.0])
    own_bytes: int = 0

    @property
    def contributions(self) -> int:
        return self.learners * self.fragments

    @property
    def moved_bytes(self) -> float:
        return 3.0 * self.learners * self.parameters


def cases() -> list[Case]:
    return [Case(n, p, m * 1_000_000) for n in (1, 16, 256) for p in (1, 8, 64) for m in (1, 8)]


@pytest.fixture
def law(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("growth_law")


def test_the_law_that_made_the_cpu_seconds_is_found_again(law: Any) -> None:
    true = law.CpuLaw(0.002, 0.001, 5e-9, 1e-9, 0.0, 0.0)
    found = law.fit_cpu([Case(c.learners, c.fragments, c.parameters, [true.seconds(c)]) for c in cases()])
    assert (found.per_version_s, found.per_contribution_s) == pytest.approx((0.002, 0.001))
    assert (found.per_parameter_s, found.per_byte_s) == pytest.approx((5e-9, 1e-9))
    assert found.worst < 1e-6


def test_the_law_that_made_the_memory_is_found_again(law: Any) -> None:
    true = law.MemoryLaw(10.0, 4.0, 1e6, 2e7)
    found = law.fit_memory([Case(c.learners, c.fragments, c.parameters, own_bytes=true.bytes(c)) for c in cases()])
    assert [found.per_parameter, found.per_fragment_parameter] == pytest.approx([10.0, 4.0])
    assert [found.per_learner, found.fixed] == pytest.approx([1e6, 2e7])


def test_no_cost_is_below_zero(law: Any) -> None:
    """Figures that grow more slowly than the contributions alone would explain with a negative cost per byte."""
    found = law.fit_cpu([Case(c.learners, c.fragments, c.parameters, [0.01 * c.learners**0.5]) for c in cases()])
    assert min(found.per_version_s, found.per_contribution_s, found.per_parameter_s, found.per_byte_s) >= 0


def test_what_one_core_serves_follows_from_the_law(law: Any) -> None:
    """As many contributions as there is time for their calls; as many bytes; and where both cost the same."""
    found = law.CpuLaw(0.002, 0.001, 5e-9, 1e-9, 0.0, 0.0)
    assert (found.contributions_per_s, found.bytes_per_s) == pytest.approx((1000, 1e9))
    assert found.per_byte_s * found.even_bytes == pytest.approx(found.per_contribution_s)
    assert "at most 1000 contributions per second" in found.words()
