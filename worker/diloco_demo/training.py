"""The built-in training loop of one learner.

Does the inner step (batch, loss, clipping, optimizer, learning rate), and decides when the worker's checkpoint is due.
Calls the `Synchroniser`, which merges with other learners, once after every inner step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from diloco_common.errors import ConfigError
from diloco_common.extensions import find, is_extension
from diloco_common.observe.logs import Log
from diloco_common.settings import TrainSettings
from diloco_demo.checkpoint import TrainingProgress
from diloco_demo.data import TokenStream
from diloco_demo.gpt import GPT
from diloco_demo.muon import MuonWithAdamW
from diloco_worker.progress_lr import WARMUP_STEPS, share

log = logging.getLogger(__name__)

CLIP = 1.0
"""Norm to which gradients are clipped."""


@dataclass(frozen=True)
class Decays:
    """How much the inner optimizer forgets in a step. The built-in training keeps these; the lab may tune them."""

    weight_decay: float = 0.1
    """Of matrices, with either optimizer."""
    beta1: float = 0.9
    beta2: float = 0.99
    """Of the running means of AdamW."""
    muon_momentum: float = 0.95


class Synchroniser(Protocol):
    """The loop's view of the rest of the run."""

    def step(self, tokens: int, loss: Tensor | float | None = None) -> None:
        """An inner step ended. May change the model's values. Never blocks on the network."""

    @property
    def done(self) -> bool:
        """Whether the budget is reached, or training was told to stop."""

    @property
    def fraction(self) -> float:
        """Global progress, merged tokens over the budget, 0 to 1; 0 without a budget."""

    @property
    def tokens_merged(self) -> int:
        """Tokens of all learners merged so far."""


@dataclass(frozen=True, slots=True)
class InnerStep:
    progress: TrainingProgress
    loss: Tensor
    """Nats per byte of the batch, before the step: a detached float32 scalar on the training device."""
    rate_share: float
    """The share of the highest learning rates that is in use."""


class Saver:
    """Calls `save` every `every_s` seconds. Disk errors do not stop training."""

    def __init__(
        self,
        save: Callable[[TrainingProgress], None],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._save = save
        self._every_s = every_s
        self._clock = clock
        self._saved_at = clock()

    def maybe(self, progress: TrainingProgress) -> None:
        if self._clock() - self._saved_at >= self._every_s:
            self.now(progress)

    def now(self, progress: TrainingProgress) -> None:
        try:
            self._save(progress)
        except OSError as error:
            log.warning("checkpoint not written, training goes on: inner_step=%d error=%s", progress.inner_step, error)
        self._saved_at = self._clock()


class ProgressLog:
    """Logs the progress of training every `every_s` seconds."""

    def __init__(
        self,
        log: Log,
        synchroniser: Synchroniser,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._synchroniser = synchroniser
        self._every_s = every_s
        self._clock = clock
        self._said_at = float("-inf")
        self._losses: list[Tensor] = []

    def __call__(self, step: InnerStep) -> None:
        self._losses.append(step.loss)
        now = self._clock()
        if now - self._said_at >= self._every_s:
            loss = float(torch.stack(self._losses).mean())  # the mean since the last line; a single loss is noise
            self._losses.clear()
            self._said_at = now
            self._log.event(
                "training", inner_step=step.progress.inner_step, loss=loss,
                tokens=step.progress.tokens, tokens_merged=self._synchroniser.tokens_merged,
            )  # fmt: skip


def train(
    synchroniser: Synchroniser,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    stream: TokenStream,
    settings: TrainSettings,
    *,
    budget: int,
    progress: TrainingProgress | None = None,
    step_min_s: float = 0.0,
    saver: Saver | None = None,
    on_step: Callable[[InnerStep], object] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> TrainingProgress:
    """Take inner steps until the synchroniser is done. Returns the learner's progress.

    `budget` is run.tokens (0: no end). `progress`: from a checkpoint; the stream continues at its position. Every step
    sleeps until it has taken at least `step_min_s`. `saver` may save after every step, and saves once at the end.
    """
    progress = progress or TrainingProgress(data_position=stream.position)
    stream.position = progress.data_position
    device = next(model.parameters()).device
    began = clock()
    while not synchroniser.done:
        share = share_at(
            fraction=synchroniser.fraction, inner_step=progress.inner_step, budget=budget, train=settings
        )  # fmt: skip
        inputs, targets = (part.to(device, non_blocking=True) for part in stream.next_batch())
        loss = _inner_step(model, optimizer, inputs, targets, share)
        rest_s = step_min_s - (clock() - began)
        if rest_s > 0:
            sleep(rest_s)
        began = clock()
        progress = TrainingProgress(progress.inner_step + 1, progress.tokens + inputs.numel(), stream.position)
        synchroniser.step(inputs.numel(), loss)
        if on_step is not None:
            on_step(InnerStep(progress, loss, share))
        if saver is not None:
            saver.maybe(progress)
    if saver is not None:
        saver.now(progress)
    return progress


def share_at(*, fraction: float, inner_step: int, budget: int, train: TrainSettings) -> float:
    """The share of the learning rate for one inner step. `inner_step` counts from 0 at the optimizer's first step.

    It rises and falls with the run's progress (in a run without end, `budget` 0, it does neither). It is multiplied by
    the rise over the first steps.
    """
    rise = min(1.0, (inner_step + 1) / WARMUP_STEPS)
    return rise * (share("linear", fraction, train.warmup, final=0.0) if budget else 1.0)


def make_optimizer(model: nn.Module, settings: TrainSettings, decays: Decays = Decays()) -> torch.optim.Optimizer:
    """Muon for the matrices that the model calls hidden, if the settings say so, and fused AdamW for the rest.

    Vectors and scalars (gains, biases) do not decay. Each group's `lr_highest` is its full learning rate. Raises
    ConfigError if the settings name an extension's optimizer that is not installed.
    """
    if is_extension(settings.optimizer):
        made: torch.optim.Optimizer = find("diloco.inner", settings.optimizer).thing(model, settings)
        for group in made.param_groups:
            group.setdefault("lr_highest", group["lr"])
        return made
    matrices = model.hidden_matrices() if settings.optimizer == "muon" and isinstance(model, GPT) else []
    hidden = {id(matrix) for matrix, _ in matrices}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in hidden]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": decays.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    others = [{**group, "lr_highest": settings.lr} for group in groups if group["params"]]
    betas = (decays.beta1, decays.beta2)
    if not matrices:
        return torch.optim.AdamW(others, lr=settings.lr, betas=betas, fused=True)
    return MuonWithAdamW(
        matrices, others, lr=settings.muon_lr, momentum=decays.muon_momentum, weight_decay=decays.weight_decay,
        betas=betas,
    )  # fmt: skip


def choose_device(name: str) -> torch.device:
    """The device for worker.device; "auto" prefers an accelerator. Raises ConfigError."""
    if name == "auto":
        module = getattr(torch, "accelerator", torch.cuda)  # torch 2.6 and later
        found = module.current_accelerator() if hasattr(module, "current_accelerator") else torch.device("cuda")
        return found if module.is_available() else torch.device("cpu")
    try:
        return torch.zeros(1, device=name).to("cpu").to(name).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
        why = str(error).splitlines()[0]
        message = f'worker.device is {name!r}, which torch cannot use here ({why}): use "auto" or "cpu"'
        raise ConfigError(message) from None


def _inner_step(model: GPT, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, share: float) -> Tensor:
    """Forward, backward, clip, step. Returns the detached loss; does not wait for the device."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.device.type != "cpu"):
        loss = model.loss(inputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for group in optimizer.param_groups:
        group["lr"] = group["lr_highest"] * share
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
