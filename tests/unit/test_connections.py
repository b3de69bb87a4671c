"""Connections over a transport in memory: what goes wrong on our side is told, and what shards hear of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from diloco_common.errors import DilocoError
from diloco_common.ports import Unavailable
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, Committed, Directive, LearnerPolicy, Progress, PullHeader, Pulse
from diloco_worker.core.events import Failed, Joined, ModelCut, StepEnded
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.shell.codec_thread import ConnectionContext
from diloco_worker.shell.connections import Connections
from parts import Believes, Parts, joined
from waiting import until_async

EPOCH = 7
NO_MANIFEST: Any = None
BELIEVES: Any = Believes()
POLICY = LearnerPolicy(4, "int8", "int8")


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
    assert "ModelCut failed: RuntimeError('no room for the tensors')" in str(failed.error)
    assert parts.telemetry.metrics.registry.get_sample_value("diloco_worker_inner_steps_total") == 1


class Shard:
    """A shard, and a control stream of it that says these directives and keeps the reports it gets. Pulling fails on
    the learner's side."""

    def __init__(self, *directives: Directive, is_there: bool = True, pull_fails: Exception | None = None) -> None:
        self.is_there = is_there
        self._pull_fails = pull_fails or RuntimeError("no room for a version")
        self.reports: list[Progress] = []
        self._directives = [Pulse(0, 0), *directives]

    async def join(self, *_: Any) -> Any:
        if not self.is_there:
            raise Unavailable("nobody answers")
        return joined(EPOCH, POLICY)

    def attend(self, *_: Any) -> Any:
        return self

    async def hear(self) -> Directive | None:
        if not self._directives:
            await asyncio.Event().wait()
        return self._directives.pop(0)

    async def report(self, progress: Progress) -> None:
        self.reports.append(progress)

    async def pull(self, *_: Any) -> AsyncGenerator[PullHeader | bytes, None]:
        raise self._pull_fails
        yield b""

    def cancel(self) -> None:
        pass

    async def leave(self, *_: Any) -> None:
        pass

    async def close(self, grace_s: float) -> None:
        pass


@asynccontextmanager
async def connected(**shards: Any) -> AsyncIterator[tuple[Connections, ConnectionContext]]:
    context = replace(Parts(encodes_at_once=True).context(), dial=shards.__getitem__)
    connections = Connections(list(shards), Progress(0, 0), context)
    for connection in connections:
        connection.agreement = BELIEVES
    running = asyncio.create_task(connections.run())
    yield connections, context
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_learner_whose_pulls_fail_for_good_is_told() -> None:
    """It would train on alone for ever, and hear nothing."""
    async with connected(shard=Shard(Committed(0, 1, EPOCH))) as (connections, context):
        replica = Replica(nn.Linear(2, 2, bias=False))
        core = LearnerCore(replica, cut(replica.specs, 1, 1), POLICY)
        connections.perform([ModelCut(core.manifest, {0: core.fragments[0].tensors})])
        while not isinstance(event := await until_async(context.inbox.pop, "the end"), Failed):
            assert isinstance(event, Joined)
        assert "no room for a version" in str(event.error)


@pytest.mark.parametrize("directive", [Committed(1, 1, EPOCH), Collect(4000, 1, EPOCH)])
async def test_what_a_shard_says_of_the_fragments_of_others_is_not_heard(directive: Directive) -> None:
    """It would be pulled from it, or end the training: there is no such fragment."""
    async with connected(shard=Shard(directive)) as (connections, context):
        (connection,) = connections
        await until_async(lambda: connection.times_up, "the stream")
        await until_async(lambda: not connection.is_up, "its end")
        assert connection.state.to_pull.now == {}
        assert {type(event) for event in context.inbox.unread()} == {Joined}


async def test_a_learner_that_waits_for_values_says_why_none_come() -> None:
    shard = Shard(Committed(0, 1, EPOCH), pull_fails=Unavailable("deadline exceeded"))
    async with connected(shard=shard) as (connections, _):
        replica = Replica(nn.Linear(2, 2, bias=False))
        core = LearnerCore(replica, cut(replica.specs, 1, 1), POLICY)
        connections.perform([ModelCut(core.manifest, {0: core.fragments[0].tensors})])
        await until_async(lambda: connections.objections, "a pull that fails")
        assert connections.objections == "pulls from shard fail: deadline exceeded"


async def test_a_shard_hears_that_pushes_to_it_fail() -> None:
    """It gets none, and cannot know."""
    there = Shard()
    async with connected(there=there) as (connections, context):
        (connection,) = connections
        await until_async(lambda: there.reports, "a report")
        connection.pusher._failing[0] = (context.world.clock() - 9.0, "status: 413")
        connection.report(Progress(1, 8))
        await until_async(lambda: there.reports[1:], "another")
    assert there.reports[1].pushes_fail_why == "status: 413"
    assert there.reports[1].pushes_fail_s >= 9.0


async def test_a_shard_hears_which_of_the_others_its_learner_does_not_reach() -> None:
    """So one shard that answers is enough to miss another one."""
    there = Shard()
    async with connected(there=there, gone=Shard(is_there=False)):
        await until_async(lambda: there.reports, "a report")
    (away,) = there.reports[0].away
    assert (away.address, away.index) == ("gone", None)
    assert away.for_s >= 0
