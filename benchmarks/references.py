"""The references for runs: plain, independent implementations of other methods.

They share no code with shard or learner, only the built-in model, its data stream and its learning-rate schedule.
Progress is the share of trained tokens. Every function returns the trained model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diloco_common.settings import Settings
from diloco_worker.builtin.data import Corpus, TokenStream
from diloco_worker.builtin.gpt import GPT, build_gpt
from diloco_worker.builtin.schedule import rate_at

Watch = Callable[[float, GPT], None]
"""Called now and then with the progress and the present model."""


def classic_diloco(settings: Settings, corpus: Corpus, learners: int, watch: Watch) -> GPT:
    """DiLoCo as published (arXiv 2311.08105): H inner steps each, mean of differences, Nesterov; float32, no overlap.

    Uses `settings.outer.lr`, `settings.outer.momentum` and `settings.sync.sync_every`. Rounds the token budget up to
    whole rounds.
    """
    theta = build_gpt(settings.model, settings.run.seed)
    models = [build_gpt(settings.model, settings.run.seed) for _ in range(learners)]
    optimizers = [_adamw(settings, model) for model in models]
    streams = [_stream(settings, corpus, m) for m in range(learners)]
    outer = torch.optim.SGD(
        theta.parameters(), lr=settings.outer.lr, momentum=settings.outer.momentum,
        nesterov=settings.outer.momentum > 0,
    )  # fmt: skip
    per_step = learners * settings.train.batch * settings.model.context
    rounds = -(-settings.run.tokens // (per_step * settings.sync.sync_every))
    total_steps = rounds * settings.sync.sync_every
    for r in range(rounds):
        for model, optimizer, stream in zip(models, optimizers, streams, strict=True):
            model.load_state_dict(theta.state_dict())
            for h in range(settings.sync.sync_every):
                step = r * settings.sync.sync_every + h
                _step(settings, model, optimizer, [stream], step, total_steps)
        with torch.no_grad():
            for name, p in theta.named_parameters():
                p.grad = p - torch.stack([model.get_parameter(name) for model in models]).mean(0)
        outer.step()
        watch((r + 1) / rounds, theta)
    return theta


def data_parallel(settings: Settings, corpus: Corpus, learners: int, watch: Watch) -> GPT:
    """One model. Every step sees one batch of each learner. With `learners` = 1, a single learner sees all tokens."""
    model = build_gpt(settings.model, settings.run.seed)
    optimizer = _adamw(settings, model)
    streams = [_stream(settings, corpus, m) for m in range(learners)]
    steps = -(-settings.run.tokens // (learners * settings.train.batch * settings.model.context))
    for step in range(steps):
        _step(settings, model, optimizer, streams, step, steps)
        watch((step + 1) / steps, model)
    return model


def _step(
    settings: Settings, model: GPT, optimizer: torch.optim.Optimizer, streams: list[TokenStream], step: int, steps: int
) -> None:
    train = settings.train
    batches = [stream.next_batch() for stream in streams]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    rate = rate_at(
        fraction=step / steps, inner_step=step, budget=1, lr=train.lr, warmup=train.warmup, final=train.lr_final
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss: Tensor = model.loss(inputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
    optimizer.step()


def _adamw(settings: Settings, model: GPT) -> torch.optim.Optimizer:
    train = settings.train
    betas = (train.beta1, train.beta2)
    return torch.optim.AdamW(model.parameters(), lr=train.lr, betas=betas, weight_decay=train.weight_decay, fused=True)


def _stream(settings: Settings, corpus: Corpus, learner: int) -> TokenStream:
    return TokenStream(
        corpus.train, learner_id=f"worker-{learner}", seed=settings.run.seed,
        context=settings.model.context, batch=settings.train.batch,
    )  # fmt: skip
