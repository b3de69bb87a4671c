"""docs/reliability.md: every case of its table names tests that exist, and that name the case."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"
CASES = {*range(1, 15), *range(16, 21), *range(22, 26)}
ROW = re.compile(r"^\| (\d+) \|.*\| ([^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
NUMBERS = re.compile(r"(?:Faults?|faults\.md) (\d+(?:(?:, | and )\d+)*)")
ROWS = [(int(case), path, test) for case, cell in ROW.findall(PAGE.read_text()) for path, test in NAMED.findall(cell)]


def test_every_case_has_its_row() -> None:
    assert {case for case, _, _ in ROWS} == CASES


@pytest.mark.parametrize(("case", "path", "test"), ROWS)
def test_the_test_of_a_case_exists_and_names_it(case: int, path: str, test: str) -> None:
    module = ast.parse((TESTS / path).read_text())
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    assert test in functions
    said = f"{ast.get_docstring(functions[test]) or ''} {ast.get_docstring(module) or ''}"
    assert case in {int(n) for numbers in NUMBERS.findall(said) for n in re.findall(r"\d+", numbers)}


def test_who_might_do_harm_is_tested() -> None:
    """Each row of the table in docs/security.md names files of tests, in its last column."""
    page = (PAGE.parent / "security.md").read_text()
    table = page.split("## Who might do harm, and what holds")[1].split("\n\n")[1]
    rows = table.splitlines()[2:]
    assert len(rows) == 8
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)`", row.split(" | ")[-1])
        assert named, row
        assert all((TESTS / path).is_file() for path in named), row
