"""Muon beside AdamW: what goes where, the update by its definition, and its state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco_common.errors import DataError
from diloco_common.settings import ModelSettings, TrainSettings
from diloco_demo.checkpoint import load_checkpoint, save_checkpoint
from diloco_demo.gpt import GPT, build_gpt
from diloco_demo.training import Decays, make_optimizer

MODEL = ModelSettings(layers=2, heads=2, width=32, context=8)
TRAIN = TrainSettings(optimizer="muon", lr=1e-2, muon_lr=3e-2)

LEARNER = {"run": "run", "inner_step": 0, "tokens": 0}


def trained(steps: int, train: TrainSettings = TRAIN) -> tuple[GPT, torch.optim.Optimizer]:
    model = build_gpt(MODEL, 0)
    optimizer = make_optimizer(model, train)
    go_on(model, optimizer, steps)
    return model, optimizer


def go_on(model: GPT, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randint(0, 256, (2, 9), generator=generator)
        model.loss(batch[:, :-1], batch[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def test_fused_matrices_are_stepped_as_the_ones_that_they_fuse() -> None:
    """Against torch.optim.Muon, which is given each of them alone."""
    model = build_gpt(MODEL, 0)
    optimizer = make_optimizer(model, TRAIN)
    parts = {(id(m), i): p.detach().clone() for m, n in model.hidden_matrices() for i, p in enumerate(m.chunk(n))}
    theirs = torch.optim.Muon(
        parts.values(), lr=TRAIN.muon_lr, weight_decay=Decays.weight_decay, momentum=Decays.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for matrix, n in model.hidden_matrices():
            matrix.grad = torch.randn(matrix.shape, generator=generator)
            for i, grad in enumerate(matrix.grad.chunk(n)):
                parts[id(matrix), i].grad = grad.clone()
        optimizer.step()
        theirs.step()
    for matrix, n in model.hidden_matrices():
        for i, part in enumerate(matrix.detach().chunk(n)):
            step = (part - parts[id(matrix), i]).norm() / part.norm()
            assert step < 0.02, "torch multiplies in bfloat16"


def test_a_checkpoint_of_another_optimizer_is_refused_with_a_way_out(tmp_path: Path) -> None:
    model, optimizer = trained(1, TrainSettings(optimizer="adamw"))
    save_checkpoint(tmp_path / "c", model, optimizer, LEARNER, 0)
    with pytest.raises(DataError, match=r"AdamW.*MuonWithAdamW.*train\.optimizer"):
        load_checkpoint(tmp_path / "c", model, make_optimizer(model, TRAIN), "run")
