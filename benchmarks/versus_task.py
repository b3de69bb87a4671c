"""The task that all systems of versus.py train: model, data, pace, and records. Needs only torch.

Each system runs under a Python of its own, so nothing of this project is imported here. All systems get the same
initial values (one seed, one version of torch), the same windows of text by rank and step, and the same optimizer.

An inner step computes its real gradients, and also waits, so that it takes as long as on an accelerator. The waiting is
spread over the layers, a third of the time forward and two thirds backward. So a system that sends gradients while
others are still being computed can hide as much as it could on an accelerator.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FORWARD_SHARE = 1 / 3
"""Share of a step for the forward pass. The backward pass has the rest, except for `OPTIMIZER_SHARE`."""
OPTIMIZER_SHARE = 0.05
WAIT_S = 320.0
"""How long to wait for the others before training begins."""


@dataclass(frozen=True)
class Task:
    """Everything that a worker of any system needs to know. It is stored as task.json in the folder of the run."""

    folder: str
    hosts: tuple[str, ...]
    """Address of each worker's machine."""
    link: str
    step_s: float
    slow_rank: int = -1
    """The worker that takes `slow_factor` times as long. -1: none."""
    slow_factor: float = 3.0
    sync_every: int = 24
    """H, in every system that has an H."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    lr: float = 1e-3
    layers: int = 8
    width: int = 256
    heads: int = 4
    context: int = 64
    batch: int = 2
    snapshot_s: float = 5.0
    """Seconds between two copies of the model, from which the held-out loss is computed after the run."""
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of one inner step of one worker."""
        return self.batch * self.context

    @property
    def workers(self) -> int:
        return len(self.hosts)

    def step_s_of(self, rank: int) -> float:
        return self.step_s * (self.slow_factor if rank == self.slow_rank else 1.0)

    def save(self) -> Path:
        path = Path(self.folder, "task.json")
        path.write_text(json.dumps(asdict(self)))
        return path

    @staticmethod
    def load(path: str) -> Task:
        found = json.loads(Path(path).read_text())
        return Task(**found | {"hosts": tuple(found["hosts"])})


class Pace:
    """Makes a step wait until an accelerator would have come equally far."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._began = time.monotonic()

    def begin(self) -> None:
        self._began = time.monotonic()

    def wait(self, share: float) -> None:
        """Wait until this share of the step's time is over."""
        rest_s = self._began + share * self._step_s - time.monotonic()
        if rest_s > 0:
            time.sleep(rest_s)


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, pace: Pace, forward_share: float, backward_share: float) -> Tensor:
        context.pace, context.share = pace, backward_share
        pace.wait(forward_share)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        context.pace.wait(context.share)
        return gradients[0], None, None, None


class SmallGpt(nn.Module):
    """A GPT over bytes made of torch's own layers. With `pace`, it takes the time of an accelerator."""

    def __init__(self, task: Task, pace: Pace | None = None) -> None:
        super().__init__()
        width = task.width
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(task.context, width)
        shape: dict[str, Any] = {
            "dropout": 0.0,
            "activation": "gelu",
            "batch_first": True,
            "norm_first": True,
            "bias": False,
        }
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, task.heads, 4 * width, **shape) for _ in range(task.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(task.context), persistent=False)
        self._pace = pace
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """The logits, [B, T, 256], for bytes, int64 [B, T]."""
        x = self.bytes(x) + self.places.weight
        backward_share, count = 1 - FORWARD_SHARE - OPTIMIZER_SHARE, len(self.layers)
        for i, layer in enumerate(self.layers):
            x = layer(x, src_mask=self.mask, is_causal=True)
            if self._pace is not None:
                left = FORWARD_SHARE + backward_share * (count - 1 - i) / count
                x = _Paced.apply(x, self._pace, FORWARD_SHARE * (i + 1) / count, left)  # type: ignore[no-untyped-call]
        logits: Tensor = self.head(self.norm(x))
        return logits

    def quarters(self) -> list[nn.Module]:
        """The model as four modules of about the same size, for systems that need it in parts."""
        ends: list[list[nn.Module]] = [[self.bytes, self.places], [], [], [self.norm, self.head]]
        per = len(self.layers) // 4
        layers = list(self.layers)
        return [nn.ModuleList([*layers[per * i : per * (i + 1)], *ends[i]]) for i in range(4)]


def make_model(task: Task, pace: Pace | None = None) -> SmallGpt:
    """The initial model. It is the same in every system with the same version of torch."""
    torch.manual_seed(task.seed)
    return SmallGpt(task, pace)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss in nats per byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Text:
    """The windows of text of one worker. Those of a step are a pure function of seed, rank and step."""

    def __init__(self, task: Task, rank: int) -> None:
        self._task, self._rank = task, rank
        self._bytes = read_bytes(Path(task.folder, "train.bin"))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [B, T]."""
        task = self._task
        chance = torch.Generator().manual_seed((task.seed * 1000 + self._rank) * 10**6 + step)
        starts = torch.randint(0, len(self._bytes) - task.context - 1, (task.batch, 1), generator=chance)
        windows = self._bytes[starts + torch.arange(task.context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def read_bytes(path: Path) -> Tensor:
    """The bytes of a file as uint8 [n]."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


class Training:
    """One worker of any system: its model and optimizer, its loop, and what it writes down."""

    def __init__(self, task: Task, rank: int) -> None:
        torch.set_num_threads(1)
        self.task, self.rank = task, rank
        self.pace = Pace(task.step_s_of(rank))
        self.model = make_model(task, self.pace)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True
        )
        self.optimizer.register_step_post_hook(lambda *_: self.pace.wait(1.0))  # before the hooks of any system
        self._text = Text(task, rank)
        self._folder = Path(task.folder)

    def run(
        self,
        *,
        forward: Callable[[Tensor], Tensor] | None = None,
        after_step: Callable[[int, Tensor], None] = lambda tokens, loss: None,
        merged: Callable[[], float] = lambda: 0.0,
        first_step: int = 0,
    ) -> None:
        """Train until killed.

        Args:
            forward: returns logits. None: the model itself.
            after_step: called with tokens and loss after the optimizer has stepped.
            merged: returns the tokens merged so far, as this system counts them.
        """
        forward = forward or self.model
        self._await_start()
        began_all = float(Path(self._folder, "go").read_text())
        snapshots, step = 0, first_step
        with Path(self._folder, f"steps-{self.rank}-{time.monotonic():.3f}.txt").open("w", buffering=1) as steps:
            while True:
                self.pace.begin()
                if (now := time.monotonic()) >= began_all + snapshots * self.task.snapshot_s:
                    snapshots = int((now - began_all) // self.task.snapshot_s)
                    self._save(snapshots)
                    snapshots += 1
                inputs, targets = self._text.batch(step)
                loss = loss_of(forward(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                after_step(self.task.tokens, loss.detach())
                step += 1
                steps.write(f"{time.monotonic():.4f} {self.task.tokens} {merged():.1f}\n")

    def _await_start(self) -> None:
        """All workers begin together. A worker that comes back later begins at once."""
        Path(self._folder, f"ready-{self.rank}").touch()
        deadline = time.monotonic() + WAIT_S
        while not (go := Path(self._folder, "go")).exists():
            assert time.monotonic() < deadline, "there was no signal to start"
            time.sleep(0.02)
        time.sleep(max(0.0, float(go.read_text()) - time.monotonic()))

    def _save(self, number: int) -> None:
        path = Path(self._folder, f"model-{number}-{self.rank}.pt")
        half = {name: values.to(torch.bfloat16) for name, values in self.model.state_dict().items()}
        torch.save(half, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
