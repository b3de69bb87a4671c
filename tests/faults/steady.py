"""A shard and learners as processes that start at once, and learners that step steadily and remember what they hear.

They are forked from a server that has imported everything, so that a shard is back a tenth of a second after it was
killed, and a hundred deaths take a minute. The processes follow the test (`diloco_common.child`).
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import diloco_worker
from diloco_common.child import end_with_parent
from diloco_common.messages import Committed
from diloco_server import cli
from diloco_worker.core import dialing

Identity = tuple[int, int]
"""Epoch and version."""

STEP_S = 0.004
TOKENS = 8
"""Of one inner step."""
ANSWER_S = 30.0
LONGEST_WAIT_S = 0.4
"""Between two attempts to reach the shard: a learner that lost it ten times in ten seconds would wait for 3 s."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["steady", "diloco_server.server", "diloco_worker.network", "torch"])


def digest(values: Tensor) -> str:
    """Of the bytes of float32 values."""
    return hashlib.sha256(values.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


@dataclass
class History:
    """What one learner did and was told, from its beginning."""

    steps: int = 0
    longest_gap_s: float = 0.0
    """Between the ends of two inner steps."""
    heard: dict[int, set[Identity]] = field(default_factory=dict)
    """Fragment -> versions that a shard announced to it."""
    held: dict[tuple[int, int, int], str] = field(default_factory=dict)
    """Fragment, epoch and version -> digest of the anchor that it decoded."""
    mixed: list[str] = field(default_factory=list)
    """Versions that came twice, with different bytes."""
    at: dict[int, Identity] = field(default_factory=dict)
    """Fragment -> version that it holds now."""
    merged_tokens: dict[int, int] = field(default_factory=dict)
    """Fragment -> its tokens that this version holds, as it counts them."""


class SteadyLearner:
    """A learner in a process of its own, which steps until it is told to pause."""

    def __init__(self, name: str, shard: str, log: Path) -> None:
        self.name = name
        self._near, far = _forks.Pipe()
        self._process = _forks.Process(target=_learn, args=(name, shard, far, log), name=name, daemon=True)
        self._process.start()

    def ask(self, what: str) -> History:
        """ "report", or "pause", after which it only takes in what arrives. Raises AssertionError if it has ended."""
        self._near.send(what)
        if not self._near.poll(ANSWER_S):
            raise AssertionError(f"{self.name} does not answer; alive: {self._process.is_alive()}")
        answer: History = self._near.recv()
        return answer

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class QuickShard:
    """A shard that is killed and started again on its ports. Started when made."""

    def __init__(self, arguments: Callable[[], list[str]], log: Path) -> None:
        self._arguments, self._log = arguments, log
        self.start()

    def start(self) -> None:
        self._process = _forks.Process(target=_serve, args=(self._arguments(), self._log), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


# ------------------------------------------------------------------ in the processes


def _begin(log: Path) -> None:
    end_with_parent(os.getppid())
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)


def _serve(arguments: list[str], log: Path) -> None:
    _begin(log)
    sys.exit(cli.main(arguments))


def _learn(name: str, shard: str, control: Connection, log: Path) -> None:
    _begin(log)
    dialing.LONGEST_S = LONGEST_WAIT_S
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 2))
    noise = torch.Generator().manual_seed(sum(name.encode()))
    history, stepping = History(), True
    with diloco_worker.join(shard, model, learner_id=name) as learner:
        for link in learner.network.links:
            link._hear = _remembering(link._hear, history)  # type: ignore[method-assign]
        ended = time.monotonic()
        while True:
            if stepping:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=1e-3)
                learner.step(tokens=TOKENS, loss=1.0)
                now = time.monotonic()
                history.longest_gap_s = max(history.longest_gap_s, now - ended)
                ended, history.steps = now, history.steps + 1
            else:
                learner.poll()
            _look(learner, history)
            if control.poll(STEP_S):
                stepping = stepping and control.recv() != "pause"
                control.send(history)


def _remembering(hear: Callable[[Any], None], history: History) -> Callable[[Any], None]:
    def remember(directive: Any) -> None:
        if isinstance(directive, Committed):
            history.heard.setdefault(directive.fragment_id, set()).add((directive.epoch, directive.version))
        hear(directive)

    return remember


def _look(learner: diloco_worker.Learner, history: History) -> None:
    """Note which versions it holds."""
    assert learner.core is not None
    for fragment_id, fragment in learner.core.fragments.items():
        identity = fragment.epoch, fragment.version
        history.merged_tokens[fragment_id] = learner.core.tokens - fragment.tokens_since(learner.core.tokens)
        if history.at.get(fragment_id) == identity or fragment.anchor is None:
            continue
        history.at[fragment_id] = identity
        found = digest(fragment.anchor)
        if history.held.setdefault((fragment_id, *identity), found) != found:
            history.mixed.append(f"fragment {fragment_id} version {identity}")
