"""The protocol: equal budgets, edges seen, other seeds for the report, intervals over pairs, divergence counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from diloco_common.errors import ConfigError
from diloco_lab.arms import Arm
from diloco_lab.protocol import (
    FIRST_TUNE_SEED,
    Protocol,
    carry_out,
    doubts,
    page,
    proposals,
)
from diloco_lab.runner import Line

AXES = {"train.lr": (1.0, 2.0, 4.0, 8.0, 16.0), "train.optimizer": ("muon", "adamw")}


def search(losses: Any, trials: int) -> dict[tuple[int, ...], float]:
    tried: dict[tuple[int, ...], float] = {}
    while points := proposals(AXES, tried, trials):
        tried |= {point: losses(*point) for point in points}
    return tried


def test_a_search_ends_where_all_neighbours_are_worse() -> None:
    tried = search(lambda lr, optimizer: abs(lr - 3) + optimizer, trials=20)
    assert min(tried, key=lambda point: tried[point]) == (3, 0)
    assert doubts(AXES, tried) == []
    assert {(2, 0), (4, 0), (3, 1)} <= tried.keys()


@pytest.mark.parametrize(
    ("losses", "trials", "doubt"),
    [
        (lambda lr, optimizer: -lr, 20, "train.lr = 16.0 lies at the edge"),
        (lambda lr, optimizer: abs(lr - 3), 3, "not all neighbours of train.lr = 8.0"),
        (lambda lr, optimizer: math.inf if lr < 4 else 1.0, 20, "lies at the edge"),
    ],
)
def test_an_edge_and_a_spent_budget_are_no_optimum(losses: Any, trials: int, doubt: str) -> None:
    tried = search(losses, trials)
    assert len(tried) <= trials
    assert doubt in "; ".join(doubts(AXES, tried))


PROTOCOL = Protocol.model_validate({
    "trials": 4, "tune_seeds": 2, "report_seeds": 3, "versions": {"2": [10, 40]},
    "arms": {
        "ours": {"axes": {"train.lr": [1e-3, 2e-3, 4e-3]}},
        "parallel": {"axes": {"train.lr": [1e-3, 2e-3, 4e-3]}, "settings": {"lab": {"method": "data-parallel"}}},
    },
})  # fmt: skip


class FakeRuns:
    """Losses by formula: best at 2e-3; ours lies 2 % above the other, and falls with the logarithm of the tokens."""

    def __init__(self) -> None:
        self.seeds: dict[str, list[int]] = {}

    def __call__(self, arms: Sequence[Arm], seeds: Sequence[int]) -> dict[str, Line]:
        return {arm.key(seed): self._line(arm, seed) for arm in arms for seed in seeds}

    def _line(self, arm: Arm, seed: int) -> Line:
        self.seeds.setdefault(arm.name, []).append(seed)
        off = abs(math.log2(arm.settings.train.lr / 2e-3))
        loss = (4 - math.log(arm.settings.run.tokens) / 10 + 0.1 * off) * (1.02 if arm.name == "ours" else 1)
        noise = 1 + 0.1 * (seed % 7)
        diverged = arm.name == "ours" and seed == 2
        result = {"loss": math.nan if diverged else loss * noise, "loss_select": loss * noise, "diverged": diverged}
        return {"seed": seed, "result": result}


def test_arms_are_tuned_alike_and_reported_on_other_seeds_in_pairs() -> None:
    runs = FakeRuns()
    *_, (cells, lines) = carry_out(PROTOCOL, runs)
    tuning = {name: [seed for seed in seeds if seed >= FIRST_TUNE_SEED] for name, seeds in runs.seeds.items()}
    assert len(tuning["ours"]) == len(tuning["parallel"]) == 2 * 2 * 3
    assert {seed for seeds in runs.seeds.values() for seed in seeds if seed < FIRST_TUNE_SEED} == {0, 1, 2}
    assert [(cell.versions, cell.tuned["ours"].values) for cell in cells] == [
        (versions, {"train.lr": 2e-3}) for versions in (10, 40)
    ]
    text = page(cells, lines)
    assert "| 2 | 40 |" in text
    assert "+2.00 % (+2.00 to +2.00) | 2 | 1 of 3, 0 of 3" in text
    assert "lies at the edge" not in text


def test_a_best_value_at_the_edge_ends_it_before_the_report_unless_edges_are_reported() -> None:
    axes = {"train.lr": [2e-3, 4e-3, 8e-3]}
    ours = PROTOCOL.arms["ours"].model_copy(update={"axes": axes})
    cut = PROTOCOL.model_copy(update={"arms": {**PROTOCOL.arms, "ours": ours}})
    runs = FakeRuns()
    with pytest.raises(
        ConfigError, match=r"ours, 2 learners, 10 versions: train.lr = 0.002 lies at the edge.*; ours, 2"
    ):
        list(carry_out(cut, runs))
    assert min(runs.seeds["ours"]) == FIRST_TUNE_SEED
    *_, (cells, lines) = carry_out(cut.model_copy(update={"edges": "report"}), FakeRuns())
    assert "| train.lr = 0.002 lies at the edge of its axis |" in page(cells, lines)
