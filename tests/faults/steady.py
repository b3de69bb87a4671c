"""A shard and learners as processes that start at once, and learners that step steadily and remember what they hear.

They are forked (forks.py), so that a shard is back a tenth of a second after it was killed, and a hundred deaths take a
minute. The processes follow the test (`diloco_common.process`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import diloco_worker
import forks
from diloco_common.wire import calls
from diloco_common.wire.messages import Committed
from processes import Shard, Status, until

Identity = tuple[int, int]
"""Epoch and version."""

SETTINGS: dict[str, Any] = {
    "sync.fragments": 4,
    "sync.sync_every": 4,
    "sync.quorum": 1,
    "sync.grace": 0.01,
    "sync.pull": "bfloat16",  # what learners hold of a version is its values, rounded once
    "lease.lease_s": 2,
    "lease.heartbeat_s": 0.4,
}
PATIENT = {"lease.lease_s": 8, "lease.heartbeat_s": 1.6}
"""For a fault that must cost no lease and no connection: a busy machine may leave a process without a core for 3 s."""
STEP_S = 0.004
TOKENS = 8
"""Of one inner step."""
CALM_S = 0.015
"""Between two steps, where nothing is shown by their number."""
FAULT_SECONDS = float(os.environ.get("FAULT_SECONDS", "0"))
"""How long faults last that may last long, at least; otherwise they last until their effect is seen."""
_NEW_NETWORK = 0x40000000


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
    tokens: int = 0
    connected: list[bool] = field(default_factory=list)
    """By shard."""
    reconnects: int = 0
    at: dict[int, Identity] = field(default_factory=dict)
    """Fragment -> version that it holds now."""
    merged_tokens: dict[int, int] = field(default_factory=dict)
    """Fragment -> its tokens that this version holds, as it counts them."""


@dataclass(frozen=True)
class Options:
    """Of a learner."""

    namespace: str = ""
    """Of the network, by name; empty for the one of the test."""
    longest_wait_s: float = 0.4
    """Between two attempts to reach a shard: who loses it ten times in ten seconds would soon wait for 3 s."""
    width: int = 24
    """The model has about width ** 2 parameters."""
    step_s: float = STEP_S
    """Between two steps."""
    decay: float = 0.0
    """Share of the parameters that a step takes away, beside the noise it adds. The loss is their mean square."""
    site: str = ""
    """Where it is, for mirrors."""
    history: str = ""
    """Folder in which it records what happens; empty: nowhere."""


class SteadyLearner(forks.Answering):
    """A learner in a process of its own, which steps until it is told to pause. Started when made."""

    def __init__(self, name: str, shards: str, folder: Path, options: Options) -> None:
        super().__init__(name, folder / f"{name}.log", _learn, name, shards, options)

    def ask(self, what: str = "report") -> History:
        """Or "pause", after which it only takes in what arrives, or "resume"."""
        answer: History = super().ask(what)
        return answer


def quick_shard(index: int, folder: Path, settings: Mapping[str, object]) -> Shard:
    """A shard that has begun to listen. It may be killed and started again."""
    where = {"shard.index": index, "shard.data_dir": folder / f"shard-{index}"}
    shard = Shard(f"shard-{index}", {**settings, **where}, folder)
    shard.start()
    assert shard.endpoints
    return shard


class SteadyCluster(ExitStack):
    """Shards that keep their versions, and learners. A context manager that ends them all."""

    def __init__(
        self, folder: Path, settings: Mapping[str, object] | None = None, *, shards: int = 1, **options: Any
    ) -> None:
        """`options`: of all learners (`Options`)."""
        super().__init__()
        self.folder, self._options = folder, Options(**options)
        self.learners: dict[str, SteadyLearner] = {}
        given = {**SETTINGS, **(settings or {}), "shard.count": shards}
        self.shards = [quick_shard(index, folder, given) for index in range(shards)]
        for shard in self.shards:
            self.callback(shard.kill)

    def add(self, *names: str, namespace: str = "") -> None:
        addresses = ",".join(shard.endpoints.grpc for shard in self.shards)
        for name in names:
            options = replace(self._options, namespace=namespace)
            self.learners[name] = SteadyLearner(name, addresses, self.folder, options)
            self.callback(self.learners[name].kill)
        for name in names:
            self.await_merged(name)

    def ask(self, what: str = "report") -> list[History]:
        return [learner.ask(what) for learner in self.learners.values()]

    def await_merged(self, name: str) -> None:
        """Wait until every fragment holds all that the learner has trained on so far."""
        goal = max(1, self.learners[name].ask().tokens)
        until(lambda: min(self.learners[name].ask().merged_tokens.values(), default=0) >= goal, f"work of {name}'s")

    def disagreements(self) -> list[str]:
        """What learners take for merged and the versions do not say, or the other way round. Learners step on after.

        Each waits until it holds the last version of every fragment; by then its own count is exact.
        """
        self.ask("pause")

        def still() -> tuple[list[Status], list[History]] | None:
            fragments = [f for shard in self.shards for f in shard.status()["fragments"]]
            histories = self.ask()
            here = {f["id"]: (f["epoch"], f["version"]) for f in fragments}
            return (fragments, histories) if all(h.at == here for h in histories) else None

        fragments, histories = until(still, "the learners to hold the last versions")
        self.ask("resume")
        return [
            f"fragment {f['id']}: {f['tokens_merged']} tokens merged, learners say {counted}"
            for f in fragments
            if f["tokens_merged"] != (counted := sum(h.merged_tokens[f["id"]] for h in histories))
        ]

    def said(self) -> str:
        logs = [member.log for member in (*self.shards, *self.learners.values())]
        return "".join(log.read_text() for log in logs if log.exists())


def _learn(name: str, shards: str, options: Options, control: Connection, log: Path) -> None:
    if options.namespace:
        _enter(options.namespace)
    forks.log_to(log)
    torch.set_num_threads(1)
    calls.LONGEST_S = options.longest_wait_s
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, options.width), nn.Tanh(), nn.Linear(options.width, options.width))
    noise = torch.Generator().manual_seed(sum(name.encode()))
    history, stepping = History(), True
    with diloco_worker.join(
        shards, model, learner_id=name, site=options.site, history=options.history or None
    ) as learner:
        for connection in learner.connections:
            connection._hear = _remembering(connection._hear, history)  # type: ignore[method-assign]
        ended = time.monotonic()
        while True:
            if stepping:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1 - options.decay).add_(
                            torch.randn(parameter.shape, generator=noise), alpha=1e-3
                        )
                    loss = max(float(parameter.square().mean()) for parameter in model.parameters())
                learner.step(tokens=TOKENS, loss=loss)
                now = time.monotonic()
                history.longest_gap_s = max(history.longest_gap_s, now - ended)
                ended, history.steps = now, history.steps + 1
            else:
                learner.poll()
            _look(learner, history)
            if control.poll(options.step_s):
                match control.recv():
                    case "pause":
                        stepping = False
                    case "resume":
                        stepping, ended = True, time.monotonic()
                control.send(history)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _remembering(hear: Callable[[Any], None], history: History) -> Callable[[Any], None]:
    def remember(directive: Any) -> None:
        if isinstance(directive, Committed):
            history.heard.setdefault(directive.fragment_id, set()).add((directive.epoch, directive.version))
        hear(directive)

    return remember


def _look(learner: diloco_worker.Learner, history: History) -> None:
    assert learner.core is not None
    history.tokens = learner.core.tokens
    history.connected = [connection.is_up for connection in learner.connections]
    history.reconnects = sum(connection.times_up - 1 for connection in learner.connections)
    for fragment_id, fragment in learner.core.fragments.items():
        identity = fragment.epoch, fragment.version
        history.merged_tokens[fragment_id] = learner.core.tokens - fragment.tokens_since(learner.core.tokens)
        before = history.at.get(fragment_id)
        if before == identity or fragment.tensors.anchor is None:
            continue
        if before is not None and identity[0] < before[0]:
            history.mixed.append(f"fragment {fragment_id} went back from {before} to {identity}")
        history.at[fragment_id] = identity
        found = digest(fragment.tensors.anchor.float())
        if history.held.setdefault((fragment_id, *identity), found) != found:
            history.mixed.append(f"fragment {fragment_id} version {identity}")
