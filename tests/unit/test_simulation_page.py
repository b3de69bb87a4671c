"""docs/simulation.md: its tables name the checks that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/simulation.md").read_text(encoding="utf-8")
PROMISES, INVARIANTS = re.search(r"### Promises(.*?)### Invariants(.*?)### What a loss", PAGE, re.S).groups()


def named(section: str) -> set[str]:
    """Functions in the first column of a section's table."""
    return {name for cell in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`(\w+)`", cell)}


def functions(file: str) -> dict[str, ast.FunctionDef]:
    module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}


def test_the_promises_are_those_that_the_judge_looks_at():
    judge = functions("simulator/diloco_simulator/verify/judge.py")
    called = {node.func.id for node in ast.walk(judge["violations"]) if isinstance(node, ast.Call)}

    assert named(PROMISES) == called


@pytest.mark.parametrize("invariant", sorted(named(INVARIANTS) - {"well_again_after_faults"}))
def test_an_invariant_on_the_page_exists(invariant: str):
    assert invariant in functions("simulator/diloco_simulator/invariants.py")


def test_the_check_of_the_cluster_exists():
    assert '"well_again_after_faults"' in (ROOT / "simulator/diloco_simulator/cluster.py").read_text(encoding="utf-8")
