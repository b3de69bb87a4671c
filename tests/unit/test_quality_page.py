"""docs/quality.md shows what is on record, and no figure that was typed by hand into a table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def quality(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    import quality

    yield quality
    sys.modules.pop("quality", None)


def rebuilt(quality, text: str) -> str:
    return quality.rebuilt(text, quality.load())


def test_the_tables_are_those_of_the_results(quality) -> None:
    text = quality.PAGE.read_text()
    assert rebuilt(quality, text) == text


def test_a_figure_that_was_typed_is_replaced(quality) -> None:
    text = quality.PAGE.read_text()
    typed = text.replace("| 1.996 | 1.921 |", "| 1.006 | 1.021 |")
    assert typed != text
    assert rebuilt(quality, typed) == text
