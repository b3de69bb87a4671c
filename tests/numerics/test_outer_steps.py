"""The outer optimizers are torch's, step by step, in float32."""

from __future__ import annotations

import pytest
import torch

from builders import make_settings, random_values
from diloco_server.core.outer import SLICE, make_outer_optimizer

RATES = {"lr": 0.7, "momentum": 0.9, "beta1": 0.8, "beta2": 0.95, "eps": 1e-8}


@pytest.mark.parametrize("num_elements", [1, 1000, SLICE + 7], ids=["one", "some", "over-a-slice"])
@pytest.mark.parametrize(
    ("name", "momentum", "twin"),
    [
        ("nesterov", 0.9, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
        ("sgd", 0.9, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)),
        ("sgd", 0.0, lambda p: torch.optim.SGD(p, lr=0.7)),
        ("adam", 0.9, lambda p: torch.optim.Adam(p, lr=0.7, betas=(0.8, 0.95), eps=1e-8)),
    ],
    ids=["nesterov", "sgd-momentum", "sgd", "adam"],
)
def test_five_outer_steps_equal_those_of_torch(name, momentum, twin, num_elements) -> None:
    optimizer = make_outer_optimizer(make_settings(outer=RATES | {"optimizer": name, "momentum": momentum}).outer)
    theta = random_values(num_elements, seed=0)
    buffers = [torch.zeros_like(theta) for _ in range(optimizer.num_buffers)]
    expected = theta.clone()
    reference = twin([expected])
    for outer_step in range(1, 6):
        gradient = random_values(num_elements, seed=outer_step)
        expected.grad = gradient.clone()
        reference.step()
        optimizer.step(theta, gradient, buffers, outer_step)
        torch.testing.assert_close(theta, expected, rtol=1e-6, atol=1e-6)


def test_sgd_without_momentum_keeps_no_buffer() -> None:
    """A float32 copy of the model saved."""
    settings = make_settings(outer={"optimizer": "sgd", "momentum": 0.0}).outer
    assert make_outer_optimizer(settings).num_buffers == 0
