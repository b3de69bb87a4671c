"""All learners stepped as one: the same values as stepping each alone, but for the rounding of sums."""

from __future__ import annotations

import pytest
import torch

from diloco_common.settings import ModelSettings, RunSettings, Settings, TrainSettings
from diloco_demo.data import Corpus
from diloco_demo.gpt import GPT
from diloco_demo.training import CLIP
from diloco_lab.tasks import BuiltIn, inner_step

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
