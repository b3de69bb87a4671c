"""Whether the cost of rare merging shrinks with model size: a byte GPT of 10 M parameters on Python's own sources.

Four learners take turns on one device. They are compared with one model that takes the batches of all four in each
step: the same tokens, and AdamW at the rate that was best at 1.5 M parameters, not tuned at this size. The lab's runs
stop at 0.4 M (docs/quality.md).
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from place import PYTHON_SOURCES, Place, train_step
from report import MEASURED, Row

import diloco_worker
from diloco_demo.data import load_corpus
from diloco_demo.gpt import GPT, evaluate
from diloco_worker.global_model import pull_global_model
from light_learners import running_shards

LEARNERS, RATE, WARM_UP, FIRST = 4, 2e-3, 0.1, 12


class Training:
    """One model, its optimizer and its batches, for `steps` steps."""

    def __init__(self, place: Place, batch: int, seed: int) -> None:
        layers, width, self.context, self.steps = (12, 256, 256, 240) if place.is_card else (2, 32, 32, 24)
        torch.manual_seed(0)
        self.place, self.batch = place, batch
        self.model: GPT = place.gpt(layers, width, self.context)
        self.batches = place.batches(batch, self.context, seed=seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=place.is_card)
        self.done = 0

    def step(self) -> int:
        """Take a step. Returns its tokens. The learning rate rises and then falls linearly."""
        share = self.done / self.steps
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min((self.done + 1) / (WARM_UP * self.steps), (1 - share) / (1 - WARM_UP))
        train_step(self.place, self.model, self.optimizer, next(self.batches))
        self.done += 1
        return self.batch * self.context

    def row(self, name: str) -> list[Row]:
        held_out = load_corpus(PYTHON_SOURCES, 0.01).held_out
        params = sum(p.numel() for p in self.model.parameters())
        loss = evaluate(self.model, held_out, self.context)
        said = (
            f"{loss:.4f} nats per byte after {self.steps} steps of {LEARNERS} x {batch_of(self.place)} x {self.context}"
        )
        return [Row(name, "", MEASURED, f"{said} bytes; {params / 1e6:.1f} M parameters, not tuned at this size")]


def batch_of(place: Place) -> int:
    return 16 if place.is_card else 4


def data_parallel(place: Place) -> list[Row]:
    training = Training(place, LEARNERS * batch_of(place), seed=0)
    while training.done < training.steps:
        training.step()
    return training.row("data-parallel")


def learners(every: int, place: Place) -> list[Row]:
    if every != FIRST:
        place.need_card("a card: the case before has rehearsed it")
    with running_shards(2, f"sync.sync_every={every}", f"sync.quorum={LEARNERS}") as shards, ExitStack() as joined:
        addresses = [shard.address for shard in shards]
        all_of: list[tuple[Training, Any]] = []
        for number in range(LEARNERS):
            training = Training(place, batch_of(place), seed=number)
            learner = diloco_worker.join(
                addresses, training.model, learner_id=f"learner-{number}", wait_s=60.0, log=None
            )
            all_of.append((training, joined.enter_context(learner)))
        while all_of[-1][0].done < all_of[-1][0].steps:
            for training, learner in all_of:
                learner.step(tokens=training.step())
        for _, learner in all_of * 4:  # so that open rounds close
            learner.poll(0.1)
        training = all_of[0][0]
        training.model.load_state_dict(dict(pull_global_model(addresses).tensors))
        return training.row(f"H = {every}")


CASES = {"data-parallel": data_parallel, "H = 12": partial(learners, 12), "H = 24": partial(learners, 24)}
