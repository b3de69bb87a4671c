"""The lab: equal runs are equal, conditions do what they say, nothing runs twice, and gaps come with intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco_common.settings import ModelSettings, RunSettings, Settings, TrainSettings
from diloco_demo.data import Corpus
from diloco_demo.gpt import GPT
from diloco_demo.training import CLIP
from diloco_lab import runner
from diloco_lab.arms import Arm, make_arm
from diloco_lab.runner import paired_gap
from diloco_lab.tasks import BuiltIn, inner_step

HERE = "tests.unit.test_lab" if __name__.startswith("tests.") else __name__
TINY: dict[str, Any] = {
    "run": {"tokens": 4 * 8 * 24},
    "sync": {"sync_every": 4, "fragments": 2, "push": "float32", "pull": "float32"},
    "train": {"batch": 8, "lr": 0.05, "optimizer": "adamw"},
}


class Line:
    tokens_per_batch = 8

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def model(self) -> nn.Module:
        torch.manual_seed(self._settings.run.seed)
        return nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def stream(self, learner: int, learners: int) -> Line:
        self._generator = torch.Generator().manual_seed(1000 * self._settings.run.seed + learner)
        return Line._Stream(self._generator)  # type: ignore[return-value]

    class _Stream:
        def __init__(self, generator: torch.Generator) -> None:
            self._generator = generator

        def next_batch(self) -> tuple[Tensor, Tensor]:
            x = torch.rand(8, 1, generator=self._generator)
            return x, 3 * x - 1

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return ((model(inputs) - targets) ** 2).mean()

    def evaluate(self, model: nn.Module, half: int, tokens: int) -> float:
        x = torch.linspace(0, 1, 16)[half::2, None]
        with torch.no_grad():
            return float(self.loss(model, x, 3 * x - 1))


def build(settings: Settings, non_iid: float) -> Line:
    return Line(settings)


def arm(name: str = "a", **tables: dict[str, Any]) -> Arm:
    content = {key: TINY.get(key, {}) | tables.get(key, {}) for key in TINY.keys() | tables.keys()}
    return make_arm(name, content, f"{HERE}:build")


def run(seed: int = 0, **tables: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = runner.run(arm(**tables), seed)["result"]
    return result


def timeless(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "wall_s"}


@pytest.mark.parametrize("method", ["decoupled", "data-parallel", "classic", "one-process"])
def test_every_method_learns_and_gives_the_same_result_again(method: str) -> None:
    first, again = run(lab={"method": method}), run(lab={"method": method})
    assert timeless(first) == timeless(again)
    assert first["loss"] < 0.8 * first["loss_first"]
    assert not first["diverged"]


@pytest.mark.parametrize(
    ("lab", "check"),
    [
        ({"speeds": [1.0, 1.0, 1.0, 0.25]}, lambda rough, calm: rough["duration"] > calm["duration"]),
        ({"drop": 0.5}, lambda rough, calm: rough["dropped"] > 0 and rough["participants"] < calm["participants"]),
        ({"delay": 2.0}, lambda rough, calm: rough["loss"] != calm["loss"]),
        ({"learners": 1}, lambda rough, calm: rough["participants"] == 1.0),
        ({"noise": 0.3}, lambda rough, calm: rough["duration"] != calm["duration"]),
        ({"kill_every": 2, "away": 8}, lambda rough, calm: rough["deaths"] >= 2 and rough["loss"] != calm["loss"]),
    ],
    ids=["speeds", "drop", "delay", "one learner", "noise", "deaths"],
)
def test_conditions_do_what_they_say(lab: dict[str, Any], check: Any) -> None:
    assert check(run(lab=lab), run())


@pytest.mark.parametrize(
    ("losses", "mean", "half_width"),
    [([1.02, 1.02, 1.02], 2.0, 0.0), ([1.01, 1.03], 2.0, 12.706), ([1.01, 1.02, 1.03], 2.0, 4.303 / 3**0.5)],
)
def test_a_gap_has_the_t_interval_of_its_pairs(losses: Sequence[float], mean: float, half_width: float) -> None:
    gap = paired_gap(losses, [1.0] * len(losses))
    assert (gap.mean, gap.half_width) == (pytest.approx(mean), pytest.approx(half_width, abs=1e-9))


def test_nothing_is_run_twice_and_a_line_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    path, said = tmp_path / "r.jsonl", []
    arms = [arm("a"), arm("b", train={"lr": 0.1})]
    first = runner.run_all(arms, [0], path, 1, said.append)
    whole = path.read_text()
    path.write_text(whole[:-20])
    again = runner.run_all(arms, [0], path, 1, said.append)
    assert [timeless(line["result"]) for line in first.values()] == [timeless(x["result"]) for x in again.values()]
    assert said[-2] == f"1 of 2 runs are in {path} already"
    assert "[1/1]" in said[-1]
    assert json.loads(whole.splitlines()[0])["settings"]["train"]["batch"] == 8


TEXT = (torch.arange(4096) ** 2 % 251).to(torch.uint8)
MODEL = ModelSettings(layers=2, heads=2, width=16, context=8)
ODD = ModelSettings(layers=1, heads=3, width=12, context=10)


def task(
    kind: type[BuiltIn], optimizer: str, tokens: int = 1000, model: ModelSettings = MODEL, batch: int = 2
) -> BuiltIn:
    train = TrainSettings(batch=batch, optimizer=optimizer, lr=0.01, muon_lr=0.01)
    settings = Settings(model=model, train=train, run=RunSettings(tokens=tokens))
    return kind(settings, corpus=Corpus(TEXT, TEXT, 1))


@pytest.mark.parametrize(("model", "batch"), [(MODEL, 2), (ODD, 6)], ids=["even", "odd"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_stack_steps_as_each_learner_alone(optimizer: str, model: ModelSettings, batch: int) -> None:
    of = task(BuiltIn, optimizer, model=model, batch=batch)
    together, alone = [of.model() for _ in range(3)], [of.model() for _ in range(3)]
    stack = of.stack(together)
    assert stack is not None
    optimizers = [of.optimizer(model) for model in alone]
    streams = [of.stream(i, 3) for i in range(3)]
    for turn, rows in enumerate([[0, 1, 2], [1], [0, 2], [0, 1, 2]]):
        if turn == 2:  # a learner that died is back
            stack.begin(2)
            optimizers[2] = of.optimizer(alone[2])
        drawn = [streams[row].next_batch() for row in rows]
        shares = [0.1 * (turn + row + 1) for row in rows]
        inputs, targets = (torch.stack(tensors) for tensors in zip(*drawn, strict=True))
        losses = stack.step(torch.tensor(rows), inputs, targets, torch.tensor(shares)).tolist()
        for row, taken, share, loss in zip(rows, drawn, shares, losses, strict=True):
            expected = inner_step(of, alone[row], optimizers[row], *taken, share, CLIP)
            assert loss == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(together, alone, strict=True):
        assert isinstance(one, GPT)
        for name, p in one.named_parameters():
            torch.testing.assert_close(p, other.get_parameter(name), rtol=1e-3, atol=2e-5)
