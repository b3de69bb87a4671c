"""The outer optimizers in numbers that can be followed by hand; tests/numerics holds them against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from builders import make_settings
from diloco_server.core.outer import make_outer_optimizer


def trajectory(gradients: list[float], **outer: Any) -> list[float]:
    optimizer = make_outer_optimizer(make_settings(outer=outer).outer)
    theta = torch.zeros(1)
    buffers = optimizer.new_buffers(1)
    path = []
    for outer_step, gradient in enumerate(gradients, start=1):
        optimizer.step(theta, torch.tensor([gradient]), buffers, outer_step)
        path.append(round(float(theta), 4))
    return path


@pytest.mark.parametrize(
    ("outer", "path"),
    [
        ({"optimizer": "sgd", "lr": 0.5, "momentum": 0.0}, [-0.5, -1.0, -1.0]),
        ({"optimizer": "sgd", "lr": 0.5, "momentum": 0.5}, [-0.5, -1.25, -1.625]),
        ({"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5}, [-0.75, -1.625, -1.8125]),
        ({"optimizer": "nesterov", "lr": 1.0, "momentum": 0.0}, [-1.0, -2.0, -2.0]),
        ({"optimizer": "adam", "lr": 0.5, "beta1": 0.0, "beta2": 0.0}, [-0.5, -1.0, -1.0]),
    ],
)
def test_descending_along_the_pseudo_gradient(outer: dict[str, Any], path: list[float]) -> None:
    assert trajectory([1.0, 1.0, 0.0], **outer) == path


@pytest.mark.parametrize("name", ["nesterov", "sgd"])
def test_nothing_to_descend_moves_nothing(name: str) -> None:
    assert trajectory([0.0, 0.0], optimizer=name) == [0.0, 0.0]
