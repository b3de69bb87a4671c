"""docs/kubernetes-sizes.md: its tables are those of the formulas, and its figures those of `diloco plan`."""

from __future__ import annotations

from pathlib import Path

from tools import kubernetes_sizes as sizes

PAGE = Path(__file__).resolve().parents[2] / "docs/kubernetes-sizes.md"


def test_the_page_has_the_tables_as_they_are_computed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert sizes.page(text) == text, "run python tools/kubernetes_sizes.py"
