"""Loops that keep their parameters in a set by what they do after each step: real learners and a real shard whose outer
step goes beyond it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from in_process import settings_with
from torch import Tensor, nn

import diloco_worker
from waiting import until

OVERSHOOTS = {"optimizer": "nesterov", "lr": 1.0, "momentum": 0.9}

Project = Callable[[Tensor], Tensor]
SETS: dict[str, tuple[Project, Callable[[Tensor], bool]]] = {
    "at least 0.001": (lambda w: w.clamp(min=1e-3), lambda w: bool((w >= 1e-3 - 1e-6).all())),
    "within 0.01": (lambda w: w.clamp(-0.01, 0.01), lambda w: bool((w.abs() <= 0.01 + 1e-6).all())),
    "a ball": (lambda w: w * (1.0 / w.norm()).clamp(max=1.0), lambda w: float(w.norm()) <= 1.0 + 1e-5),
    "a simplex": (
        lambda w: w.clamp(min=1e-6) / w.clamp(min=1e-6).sum(),
        lambda w: abs(float(w.sum()) - 1.0) < 1e-5 and bool((w >= 0).all()),
    ),
    "a grid": (lambda w: (w * 64).round() / 64, lambda w: torch.equal(w * 64, (w * 64).round())),
}


class Mixture(nn.Module):
    """64 numbers that its loss draws out of every set."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weights).sum(1).square().mean() - self.weights[0]


@pytest.mark.parametrize("name", SETS)
def test_versions_lie_in_the_set_of_the_loop(serve, written, name: str) -> None:
    project, is_in = SETS[name]
    shard = serve(settings_with(sync={"sync_every": 2, "quorum": 1}, outer=OVERSHOOTS))
    model = Mixture()

    def clamp() -> None:
        model.weights.copy_(project(model.weights))

    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    learner = diloco_worker.join(shard.address, model, after_version=clamp, optimizer=optimizer, wait_s=20.0)

    def trained() -> bool:
        optimizer.zero_grad()
        model(torch.randn(16, 64)).backward()
        optimizer.step()
        with torch.no_grad():
            clamp()
        learner.step(samples=16)
        assert is_in(model.weights.detach())
        return shard.version() >= 60

    until(trained, "many versions, none of which ends the learner")
    with learner.global_values():
        assert is_in(model.weights.detach())
    assert learner.finish()
    assert is_in(model.weights.detach())
    assert "VERSION_UNDONE" not in written.getvalue()
