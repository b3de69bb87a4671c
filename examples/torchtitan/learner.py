"""torchtitan's Trainer as a learner: its ranks are one island.

diloco-server --listen 127.0.0.1:50051 --set run.id=titan --set run.tokens=100_000_000
PYTHONPATH=examples/torchtitan torchrun --nproc-per-node=8 -m torchtitan.train --module learner \
    --config llama3_debugmodel --shards 127.0.0.1:50051

It joins once the checkpoint is loaded, reports after each optimizer step how many tokens its rank had, lets the
learning rate follow the run, stops at the budget, and saves the global model. It supports FSDP2 and HSDP; tensor and
pipeline parallelism are refused. For another config of torchtitan, add lines like those at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.trainer import Trainer

import diloco_worker


class DilocoTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        shards: str = "127.0.0.1:50051"
        run: str = "titan"
        learner_id: str = ""
        """Give it a stable name: after a restart of all ranks it is the same learner."""

    learner: diloco_worker.Learner | None = None
    saved: dict[str, Any] = diloco_worker.blank_state()

    def train_step(self, data_iterator: Any) -> None:
        if self.learner is None:  # the checkpoint is loaded by now
            config = self.config
            self.learner = diloco_worker.join(
                config.shards, self.model_parts[0], run=config.run, learner_id=config.learner_id,
                island=dist.group.WORLD, state=self.saved,
            )  # fmt: skip
            torch.manual_seed(self.learner.seed + self.learner.inner_step)
        schedule = self.config.lr_scheduler
        step = max(
            int(self.learner.fraction * (schedule.total_steps or self.config.training.steps)),
            min(self.step, schedule.warmup_steps),  # the optimizer begins without moments
        )
        for scheduler in self.lr_schedulers:
            scheduler.last_epoch = step - 1  # the Trainer adds one
        before = self.ntokens_seen
        super().train_step(data_iterator)
        self.learner.step(tokens=self.ntokens_seen - before)

    def should_continue_training(self) -> bool:
        return super().should_continue_training() and not (self.learner and self.learner.done)

    def train(self) -> None:
        super().train()
        assert self.learner is not None
        self.learner.finish()
        self.checkpointer.save(self.step, last_step=True)  # the global model

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"learner": self.learner.state_dict() if self.learner else self.saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.saved = state_dict["learner"]

    def close(self) -> None:
        if self.learner is not None:
            self.learner.close()
        super().close()


def learner_of(config: Trainer.Config) -> DilocoTrainer.Config:
    """The same config, for a learner."""
    return DilocoTrainer.Config(**{f.name: getattr(config, f.name) for f in fields(config)})


def llama3_debugmodel() -> DilocoTrainer.Config:
    return learner_of(llama3.llama3_debugmodel())
