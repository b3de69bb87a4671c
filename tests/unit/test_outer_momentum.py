"""The outer momentum of a round follows how many learners are merged, and by what rule."""

from __future__ import annotations

import pytest
import torch

from builders import make_contribution, make_settings
from diloco_server.core.outer import BFLOAT16_MU_MAX, make_outer_optimizer, momentum_for
from rig import SIZE, Rig


def merged(*tokens: int) -> list:
    return [make_contribution(f"{i:02}", torch.ones(4), tokens=n) for i, n in enumerate(tokens)]


@pytest.mark.parametrize(
    ("tokens", "mean", "agreement"),
    [
        ([5], 0.0, 0.0),
        ([5] * 2, 1 / 3, 1 / 2),
        ([5] * 4, 1 / 2, 2 / 3),
        ([5] * 8, 3 / 5, 0.7),
        ([5] * 16, 2 / 3, 0.7),
        ([5] * 64, 0.7, 0.7),
        ([5, 5, 0], 1 / 3, 1 / 2),  # who brings nothing is nobody
        ([1000, 1, 1, 1], 0.0, 0.0),  # the work of one
    ],
)
def test_it_grows_with_the_learners_merged(tokens: list[int], mean: float, agreement: float) -> None:
    assert momentum_for(merged(*tokens), "mean") == pytest.approx(mean, abs=1e-5)
    assert momentum_for(merged(*tokens), "agreement") == pytest.approx(agreement, abs=1e-5)
    assert momentum_for(merged(*tokens)[::-1], "mean") == momentum_for(merged(*tokens), "mean")


@pytest.mark.parametrize(
    ("momentum", "learners", "mu"), [("auto", 4, 0.5), ("auto", 1, 0.0), (0.9, 4, 0.9), (0.0, 4, 0.0)]
)
def test_a_shard_steps_by_it(momentum: float | str, learners: int, mu: float) -> None:
    """Equal contributions of 1, outer rate 1."""
    names = [f"learner-{i}" for i in range(learners)]
    rig = Rig(outer={"optimizer": "nesterov", "lr": 1.0, "momentum": momentum}).started(*names)
    expected = b = 0.0
    for number in (1, 2):
        for name in names:
            rig.contribute(name, number)
        b = mu * b + 1
        expected -= 1 + mu * b
        assert rig.theta == [pytest.approx(expected)]
        rig.step(*names, steps=4)


def test_its_buffers_are_those_of_the_largest_it_may_be() -> None:
    optimizer = make_outer_optimizer(make_settings().outer)

    assert optimizer.momentum == BFLOAT16_MU_MAX
    assert [b.dtype for b in optimizer.new_buffers(SIZE)] == [torch.bfloat16]
