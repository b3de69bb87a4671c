"""What a step counts, and loops that sit inside a library: `learner.follow(optimizer, samples=64)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from diloco_common.observe.logs import Log
from diloco_worker.shell.optimizers import Following

LOG = Log("cat")


class Counting:
    def __init__(self, budget: int = 100) -> None:
        self.told: list[tuple[int | None, int | None]] = []
        self.budget = budget

    @property
    def done(self) -> bool:
        return len(self.told) >= self.budget

    def step(self, tokens: int | None = None, *, samples: int | None = None) -> None:
        self.told.append((tokens, samples))


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    ("amounts", "told"),
    [((None, 64), (None, 64)), ((32, None), (32, None)), ((None, lambda: 5), (None, 5))],
)
def test_each_step_of_the_optimizer_is_a_step(amounts: Any, told: Any) -> None:
    learner, followed = Counting(), optimizer()
    following = Following(learner, followed, *amounts, LOG)
    followed.step()
    followed.step()
    assert learner.told == [told, told]
    following.remove()
    followed.step()
    assert len(learner.told) == 2


def test_the_end_of_the_run_is_said_once(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    learner, followed = Counting(budget=2), optimizer()
    Following(learner, followed, None, 1, LOG)
    with caplog.at_level("WARNING", "diloco"):
        for _ in range(2):
            followed.step()
        assert not caplog.records, "the loop may end now"
        for _ in range(2):
            followed.step()
    assert len(learner.told) == 4, "the loop is not ours to end"
    assert [record.getMessage().count("in no version") for record in caplog.records] == [1]
