"""Honest learners that train beside an attack: real ones, by the public `join`, in a process of their own.

A step takes at least `STEP_S`, as it would on a GPU. So a learner that loses steps has lost them to its shard, and not
to whoever else uses the cores of this machine, unless they leave it less than a quarter of one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

import diloco_worker
import forks
from builders import TinyText, inner_step
from diloco_common.errors import DilocoError

STEP_S = 0.02
SEQUENCES, LENGTH = 4, 8
TOKENS = SEQUENCES * LENGTH
"""Of one inner step."""
JOIN_S = 60.0


@dataclass
class Report:
    """What honest learners of one process have done until now."""

    at: float
    """Seconds, by the monotonic clock."""
    steps: int = 0
    """Of the first of them."""
    tokens: int = 0
    """That it has trained on."""
    merged: int = 0
    """Of these, what is in the latest version of every fragment, as far as it knows."""
    versions: int = 0
    """That it holds, summed over fragments."""
    stopped: str = ""
    """The stable code and words of what ended one of them."""


class Honest(forks.Answering):
    """Learners in a process of their own, which train until they are killed. Started when made."""

    def __init__(self, names: list[str], shard: str, folder: Path, token: str | None, tls: Mapping[str, Path]) -> None:
        """`tls`: folders, by name."""
        given = (names, shard, token, dict(tls))
        super().__init__(names[0], folder / f"{names[0]}.log", _train, *given)
        self.names = names

    def ask(self, what: str = "report") -> Report:
        answer: Report = super().ask(what)
        return answer


def lesson(generator: torch.Generator) -> Tensor:
    """int64 [SEQUENCES, LENGTH]: the next token follows from the last two, so there is something to learn."""
    first = torch.randint(0, TinyText.VOCABULARY, (SEQUENCES, 1), generator=generator)
    stride = torch.randint(1, 4, (SEQUENCES, 1), generator=generator)
    return (first + stride * torch.arange(LENGTH + 1)) % TinyText.VOCABULARY


def _train(
    names: list[str], shard: str, token: str | None, tls: dict[str, Path], control: Connection, log: Path
) -> None:
    forks.log_to(log)
    torch.set_num_threads(1)
    chance = torch.Generator().manual_seed(sum(names[0].encode()))
    models = [TinyText() for _ in names]
    optimizers = [torch.optim.AdamW(m.parameters(), 3e-3) for m in models]
    report, learners = Report(time.monotonic()), []
    try:
        for name, model in zip(names, models, strict=True):
            known = {"learner_id": name, "token": token, "tls": tls.get(name), "wait_s": JOIN_S}
            learners.append(diloco_worker.join(shard, model, **known))
        while True:
            began = time.monotonic()
            for model, optimizer, learner in zip(models, optimizers, learners, strict=True):
                batch = lesson(chance)
                loss = float(model.loss(batch).detach())
                inner_step(model, optimizer, batch)
                learner.step(tokens=TOKENS, loss=loss)
            report.steps += 1
            if control.poll(max(0.0, STEP_S - (time.monotonic() - began))):
                control.recv()
                _look(learners[0], report)
                control.send(report)
    except DilocoError as error:
        report.stopped = f"{error.code}: {error}"
    except (EOFError, BrokenPipeError):
        os._exit(0)
    while control.recv():
        report.at = time.monotonic()
        control.send(report)


def _look(learner: diloco_worker.Learner, report: Report) -> None:
    core = learner.core
    assert core is not None
    fragments = core.fragments.values()
    report.at, report.tokens = time.monotonic(), core.tokens
    report.merged = min(core.tokens - fragment.tokens_since(core.tokens) for fragment in fragments)
    report.versions = sum(fragment.version for fragment in fragments)
