"""References for runs: plain, independent implementations of other methods.

They share no code with shard or learner, except the task and the learning-rate schedule. Progress is the share of
tokens trained so far. Every function returns the trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from diloco_common.settings import Settings
from diloco_demo.training import CLIP, share_at
from diloco_lab.tasks import Stream, Task, inner_step

Watch = Callable[[float, nn.Module], None]
"""Called now and then with the progress and the current model."""


def classic_diloco(settings: Settings, task: Task, learners: int, watch: Watch) -> nn.Module:
    """DiLoCo as published (arXiv 2311.08105): H inner steps each, mean of differences, Nesterov; float32, no overlap.

    Uses `settings.outer.lr`, `settings.outer.momentum` ("auto": 0.9, as published) and `settings.sync.sync_every`.
    Rounds the token budget up to whole rounds.
    """
    momentum = 0.9 if settings.outer.momentum == "auto" else settings.outer.momentum
    theta = task.model()
    models = [task.model() for _ in range(learners)]
    optimizers = [task.optimizer(model) for model in models]
    streams = [task.stream(m, learners) for m in range(learners)]
    outer = torch.optim.SGD(theta.parameters(), lr=settings.outer.lr, momentum=momentum, nesterov=momentum > 0)
    every = settings.sync.first_every
    rounds = -(-settings.run.tokens // (learners * task.tokens_per_batch * every))
    for r in range(rounds):
        for model, optimizer, stream in zip(models, optimizers, streams, strict=True):
            model.load_state_dict(theta.state_dict())
            for step in range(r * every, (r + 1) * every):
                _step(settings, task, model, optimizer, [stream], step, rounds * every)
        with torch.no_grad():
            for name, p in theta.named_parameters():
                p.grad = p - torch.stack([model.get_parameter(name) for model in models]).mean(0)
        outer.step()
        watch((r + 1) / rounds, theta)
    return theta


def data_parallel(settings: Settings, task: Task, learners: int, watch: Watch, batches: int = 1) -> nn.Module:
    """One model; every step uses `batches` batches of each learner. With `learners` = 1 this is a single process."""
    model = task.model()
    optimizer = task.optimizer(model)
    streams = [stream for m in range(learners) for stream in [task.stream(m, learners)] * batches]
    steps = -(-settings.run.tokens // (learners * batches * task.tokens_per_batch))
    for step in range(steps):
        _step(settings, task, model, optimizer, streams, step, steps)
        watch((step + 1) / steps, model)
    return model


def _step(
    settings: Settings, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, streams: Sequence[Stream],
    step: int, steps: int,
) -> None:  # fmt: skip
    inputs, targets = (torch.cat(parts) for parts in zip(*(s.next_batch() for s in streams), strict=True))
    share = share_at(fraction=step / steps, inner_step=step, budget=1, train=settings.train)
    inner_step(task, model, optimizer, inputs, targets, share, CLIP)
