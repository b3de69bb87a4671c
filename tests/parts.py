"""Parts of a learner without threads, sockets and clocks: what is handed to others waits until the test looks at it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch import nn

from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.worker import WorkerMetrics
from diloco_common.ports import World
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, FragmentStatus, LearnerPolicy, Pulse
from diloco_worker.core.connection import Caller
from diloco_worker.core.events import Act, Arrived, Asked, Event, Joined, PushContribution
from diloco_worker.core.replica import Replica
from diloco_worker.learner import Learner, make_learner
from diloco_worker.shell.boundary import Start
from diloco_worker.shell.codec_thread import CodecThread, ConnectionContext
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.council import Council
from diloco_worker.shell.telemetry import LearnerTelemetry

CALLER = Caller("local", "cat", "process of cat")


class Clock:
    """Time that passes when the test says so, or by `tick` with every look, in seconds."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 1000.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Jobs(Executor):
    """Runs what was submitted when the test says so, or at once."""

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self.waiting: list[Callable[[], None]] = []

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self.waiting.append(run)
        if self._at_once:
            self.run()
        return future

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for run in waiting:
            run()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.waiting.clear()


class Posted:
    """A background that keeps the acts, step boundary by step boundary, and performs none."""

    def __init__(self) -> None:
        self.acts: list[Sequence[Act]] = []

    def start(self, connections: Connections) -> None:
        pass

    def post(self, acts: Sequence[Act]) -> None:
        self.acts.append(acts)

    def stop(self, settle_s: float) -> None:
        self.settle_s = settle_s


def joined(
    epoch: int, policy: LearnerPolicy, *, generation: int = 1, num_fragments: int = 1,
    fragments: Sequence[FragmentStatus] | None = None, digest: str = "digest", address: str = "shard:1",
    index: int = 0, num_shards: int = 1,
) -> Joined:  # fmt: skip
    """The answer of a shard, by default the only one of a run; `fragments`: if some are not seeded."""
    statuses = [FragmentStatus(i, True, 0, 0, epoch) for i in range(num_fragments)] if fragments is None else fragments
    return Joined(
        generation, epoch, 1.0, index, num_shards, num_fragments, digest, policy, tuple(statuses), Pulse(0, 0),
        address=address,
    )  # fmt: skip


class Believes:
    """An agreement of shards that takes whatever they say."""

    def take(self, joined: Joined) -> None:
        pass


class Parts:
    def __init__(self, *, encodes_at_once: bool = False) -> None:
        self.clock = Clock()
        self.jobs = Jobs(at_once=encodes_at_once)
        self.posted = Posted()
        self.world = World(self.clock, self.clock, random.Random(0), lambda count, name: self.jobs)
        self.telemetry = LearnerTelemetry(CALLER, self.clock, WorkerMetrics(), Log("cat"))

    def context(self, device: str = "cpu") -> ConnectionContext:
        """What connections share; the inbox is empty, and nobody can be dialed."""
        codec = CodecThread(torch.device(device), self.world, self.telemetry)
        dial: Any = None
        return ConnectionContext(CALLER, (), dial, self.world, Council(), codec, self.telemetry)

    def learner(self, model: nn.Module, addresses: Sequence[str] = ("shard:1",), *, resumed: bool = False) -> Learner:
        """It dials nobody."""
        replica = Replica(model)
        dial: Any = lambda address: None  # noqa: E731
        return make_learner(
            replica,
            addresses,
            CALLER,
            dial,
            self.world,
            self.posted,
            self.telemetry,
            Start(resumed=resumed),
        )


EPOCH = 5
POLICY = LearnerPolicy(1, "float32", "float32")


class Rig:
    """A learner of some fragments of one element each, which holds version 0, all 10. Its codec thread is stalled."""

    def __init__(self, num_fragments: int = 2) -> None:
        self.parts = Parts()
        self.model = nn.ParameterList(nn.Parameter(torch.full((1,), 10.0)) for _ in range(num_fragments))
        self.learner = self.parts.learner(self.model)
        digest = cut(Replica(self.model).specs, num_fragments, 1).digest
        self.hears(joined(EPOCH, POLICY, num_fragments=num_fragments, digest=digest))
        for i in range(num_fragments):
            self.arrives(i, 0, 10.0)
        assert self.learner.begin()

    def hears(self, event: Event) -> None:
        self.learner._inbox.put(event)

    def arrives(self, fragment_id: int, version: int, value: float, merged_version: int = 0) -> None:
        self.hears(Arrived(fragment_id, version, EPOCH, torch.full((1,), value), merged_version))

    def steps(self, by: float = 2.0) -> None:
        with torch.no_grad():
            for parameter in self.model:
                parameter.add_(by)
        self.learner.step(tokens=8)

    def asks(self) -> None:
        for i in range(2):
            self.hears(Asked(Collect(i, 1, EPOCH), EPOCH))

    @property
    def values(self) -> list[float]:
        return [parameter.item() for parameter in self.model]

    @property
    def versions(self) -> list[int]:
        assert self.learner.core is not None
        return [fragment.version for fragment in self.learner.core.fragments.values()]

    def contributed(self) -> list[float]:
        """The codec thread goes on: what it encodes."""
        self.parts.jobs.run()
        acts = [act for acts in self.parts.posted.acts for act in acts if isinstance(act, PushContribution)]
        return [float(act.contribution.tensors.snapshot) for act in acts]
