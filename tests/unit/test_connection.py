"""A connection over a transport in memory: what goes wrong on our side is told to the training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, Committed, Directive, LearnerPolicy, Progress, PullHeader, Pulse
from diloco_worker.core.events import Failed, Joined
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.shell.connection import Connection
from parts import Believes, Parts, joined
from waiting import until_async

EPOCH = 7
BELIEVES: Any = Believes()
POLICY = LearnerPolicy(4, "int8", "int8", "carry", 0.5, True)


class Stream:
    """Says what it is given, and then nothing more."""

    def __init__(self, *directives: Directive) -> None:
        self._directives = list(directives)

    async def report(self, progress: Progress) -> None:
        pass

    async def hear(self) -> Directive | None:
        if not self._directives:
            await asyncio.Event().wait()
        return self._directives.pop(0)

    def cancel(self) -> None:
        pass


class Unreadable:
    """A shard that announces a version; pulling it fails on the learner's side."""

    async def join(self, *_: Any) -> Any:
        return joined(EPOCH, POLICY)

    def attend(self, *_: Any) -> Stream:
        return Stream(Pulse(0, 0), Committed(0, 1, EPOCH))

    async def pull(self, *_: Any) -> AsyncGenerator[PullHeader | bytes, None]:
        raise RuntimeError("no room for a version")
        yield b""

    async def close(self, grace_s: float) -> None:
        pass


def test_a_learner_whose_pulls_fail_for_good_is_told() -> None:
    """It would train on alone for ever, and hear nothing."""

    async def run() -> None:
        shard: Any = Unreadable()
        context = replace(Parts(encodes_at_once=True).context(), dial=lambda address: shard)
        connection = Connection("shard:1", Progress(0, 0), context)
        connection.agreement = BELIEVES
        replica = Replica(nn.Linear(2, 2, bias=False))
        core = LearnerCore(replica, cut(replica.specs, 1, 1), POLICY)
        context.codec.own({0: core.fragments[0].tensors})
        connection.model_is_cut(core.manifest)
        running = asyncio.create_task(connection.run())
        first = await until_async(context.inbox.pop, "the lease, or the end")
        failed = first if isinstance(first, Failed) else await until_async(context.inbox.pop, "the end")
        assert isinstance(failed, Failed)
        assert "no room for a version" in str(failed.error)
        await asyncio.wait_for(running, 10.0)

    asyncio.run(run())


class Meddling(Unreadable):
    """A shard that speaks of a fragment that is not its own."""

    def __init__(self, directive: Directive) -> None:
        self.directive = directive

    def attend(self, *_: Any) -> Stream:
        return Stream(Pulse(0, 0), self.directive)

    async def leave(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("directive", [Committed(1, 1, EPOCH), Collect(4000, 1, EPOCH)])
def test_what_a_shard_says_of_the_fragments_of_others_is_not_heard(directive: Directive) -> None:
    """It would be pulled from it, or end the training: there is no such fragment."""

    async def run() -> None:
        shard: Any = Meddling(directive)
        context = replace(Parts(encodes_at_once=True).context(), dial=lambda address: shard)
        connection = Connection("shard:1", Progress(0, 0), context)
        connection.agreement = BELIEVES
        running = asyncio.create_task(connection.run())
        await until_async(lambda: connection.times_up, "the stream")
        await until_async(lambda: not connection.is_up, "its end")
        assert connection.state.to_pull.now == {}
        events = []
        while (event := context.inbox.pop()) is not None:
            events.append(type(event))
        assert set(events) == {Joined}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
