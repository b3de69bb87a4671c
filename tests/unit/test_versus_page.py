"""The tables of docs/comparison.md say what was lost as plainly as what was won."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import versus_page


def result(system: str, merged: float, loss: float = 3.0, case: str = "plain", stall_s: float = 0.01) -> dict[str, Any]:
    return {
        "system": system, "link": "100mbit", "case": case, "trained_per_s": merged, "merged_per_s": merged,
        "stall_median_s": 0.0, "stall_p99_s": stall_s, "stall_max_s": stall_s, "bytes_per_token": 7.0, "deaths": [],
        "losses": [[0.0, 5.6], [5.0, loss], [10.0, 0.1]], "seconds": 2.0, "times": {"warm": 8.0},
    }  # fmt: skip


@pytest.mark.parametrize(("ddp", "verdict"), [(100, "won"), (101, "**lost**")])
def test_a_goal_is_won_from_its_figure_on(ddp: float, verdict: str) -> None:
    goals = versus_page.tables([result("ours", 1000), result("ddp", ddp)])["goals"]
    assert f"x torch DDP | {verdict} |" in goals


@pytest.mark.parametrize(("stall_s", "verdict"), [(0.05, "won"), (0.051, "**lost**")])
def test_one_long_stall_of_an_honest_worker_loses(stall_s: float, verdict: str) -> None:
    goals = versus_page.tables([result("ours", 1000, case="slow", stall_s=stall_s)])["goals"]
    assert f"longest {1000 * stall_s:.0f} ms | {verdict} |" in goals


def test_the_best_peer_counts_not_the_first() -> None:
    goals = versus_page.tables([result("ours", 1000), result("torchft", 200), result("hivemind", 800)])["goals"]
    assert "1.2 x hivemind | **lost** |" in goals


def test_a_loss_above_the_best_of_all_peers_is_lost() -> None:
    peers = [result("ddp", 1, loss=3.1), result("torchft", 1, loss=2.9)]
    assert "3.00, the best peer (torchft) 2.90 | **lost** |" in versus_page.tables([result("ours", 9), *peers])["goals"]
    assert (
        "2.80, the best peer (torchft) 2.90 | won |"
        in versus_page.tables([result("ours", 9, loss=2.8), *peers])["goals"]
    )


def test_a_peer_that_cannot_says_what_happened() -> None:
    failed = {"system": "torchft", "link": "100mbit", "case": "plain", "failed": "too many deaths; the last: a | b"}
    tables = versus_page.tables([result("ours", 1000), failed])
    assert "torchft | could not: too many deaths; the last: a / b |" in tables["plain"]
    assert "torchft" not in tables["goals"]
