"""examples/one_round.py, which newcomers read first: one whole round, in at most 160 lines."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/one_round.py"


def test_both_learners_are_in_the_version(capsys) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 160
    runpy.run_path(str(EXAMPLE))["main"]()
    said = capsys.readouterr().out
    assert "participants=2" in said
    assert all(f"{name}    pulls version 1" in said for name in ("paris", "tokyo"))
