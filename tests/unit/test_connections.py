"""The acts of a step boundary: one that fails is told to the training, and those after it are performed. And what
shards hear of each other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from diloco_common.errors import DilocoError
from diloco_common.ports import Unavailable
from diloco_common.wire import protobuf
from diloco_common.wire.messages import Directive, LearnerPolicy, Progress, Pulse, ShardAway
from diloco_worker.core.acts import ModelCut, StepEnded
from diloco_worker.core.events import Failed
from diloco_worker.shell.connections import Connections
from parts import Believes, Parts, joined
from waiting import until_async

NO_MANIFEST: Any = None
BELIEVES: Any = Believes()


def test_an_act_that_fails_is_told_and_the_others_are_performed() -> None:
    """Only the event loop would hear of it, and the learner would train on alone."""
    parts = Parts()
    context = parts.context()

    def fails(tensors: object) -> None:
        raise RuntimeError("no room for the tensors")

    context.codec.own = fails  # type: ignore[method-assign,assignment]
    connections = Connections([], Progress(0, 0), context)
    ended = StepEnded(Progress(1, 8), 8, 0.5, 0.001)

    connections.perform([ModelCut(NO_MANIFEST, {}), ended])

    failed = context.inbox.pop()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, DilocoError)
    assert "ModelCut" in str(failed.error)
    assert "no room for the tensors" in str(failed.error)
    assert parts.telemetry.metrics.registry.get_sample_value("diloco_worker_inner_steps_total") == 1


class Hears:
    """A shard, and a control stream of it, that keeps the reports it gets. Or one that nobody reaches."""

    def __init__(self, is_there: bool) -> None:
        self.is_there = is_there
        self.reports: list[Progress] = []
        self._said = False

    async def join(self, *_: Any) -> Any:
        if not self.is_there:
            raise Unavailable("nobody answers")
        return joined(7, LearnerPolicy(4, "int8", "int8", "carry", 0.5, True))

    def attend(self, *_: Any) -> Any:
        return self

    async def hear(self) -> Directive | None:
        if self._said:
            await asyncio.Event().wait()
        self._said = True
        return Pulse(0, 0)

    async def report(self, progress: Progress) -> None:
        self.reports.append(progress)

    def cancel(self) -> None:
        pass

    async def close(self, grace_s: float) -> None:
        pass


def test_a_shard_hears_which_of_the_others_its_learner_does_not_reach() -> None:
    """So one shard that answers is enough to miss another one."""

    async def run() -> None:
        shards: dict[str, Any] = {"there:1": Hears(True), "gone:2": Hears(False)}
        context = replace(Parts(encodes_at_once=True).context(), dial=shards.__getitem__)
        connections = Connections(list(shards), Progress(0, 0), context)
        for connection in connections:
            connection.agreement = BELIEVES
        running = asyncio.create_task(connections.run())
        await until_async(lambda: shards["there:1"].reports, "a report")
        (away,) = shards["there:1"].reports[0].away
        assert (away.address, away.index) == ("gone:2", None)
        assert away.for_s >= 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_what_is_away_travels_within_its_limits() -> None:
    away = tuple(ShardAway(f"ps-{i}:50051", i, 1e9) for i in range(100))
    came = protobuf.progress_from_pb(protobuf.progress_to_pb(Progress(1, 2, away=away))).away
    assert came == tuple(ShardAway(f"ps-{i}:50051", i, 2.0**20) for i in range(64))
