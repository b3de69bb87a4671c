"""The tables of docs/comparison.md hold what was measured, also where a system could not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import versus
import versus_page

FAILED = {"system": "torchft", "link": "100mbit", "case": "plain", "failed": "too many deaths; the last: a | b"}


def result(deaths: list[str]) -> dict[str, Any]:
    return {
        "system": "ours", "link": "100mbit", "case": "plain", "merged_per_s": 1000.0, "stall_max_s": 0.051,
        "bytes_per_token": 7.0, "deaths": deaths, "losses": [[0.0, 5.6], [5.0, 3.0], [10.0, 0.1]], "seconds": 2.0,
        "times": {"warm": 8.0},
    }  # fmt: skip


@pytest.mark.parametrize(("deaths", "said"), [([], "1000"), (["a"], "1000; 1 processes ended by themselves")])
def test_a_row_has_the_loss_before_the_end_and_the_longest_stall(deaths: list[str], said: str) -> None:
    assert f"| 100 Mbit/s | ours | {said} | 51 ms | 7 | 3.00 |" in versus_page.tables([result(deaths)])["plain"]


def test_a_peer_that_cannot_says_what_happened() -> None:
    assert "torchft | could not: too many deaths; the last: a / b |" in versus_page.tables([FAILED])["plain"]


def test_the_page_has_what_is_on_record() -> None:
    results = [r for r in versus.read(versus.RESULTS) if r["seed"] == 0]
    page = versus_page.PAGE.read_text()
    for table in (*versus_page.tables(results).values(), versus_page.longer_table(versus.read(versus.LONGER))):
        assert table in page
