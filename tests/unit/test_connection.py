"""A connection over a transport in memory: what goes wrong on our side is told to the training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from torch import nn

from diloco_common.manifest import cut
from diloco_common.messages import Committed, Directive, LearnerPolicy, Progress, PullHeader, Pulse
from diloco_worker.connection import Connection
from diloco_worker.core.events import Failed
from diloco_worker.core.replica import Replica
from parts import Parts, joined
from waiting import until_async

EPOCH = 7
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
        connection.model_is_cut(cut(Replica(nn.Linear(2, 2, bias=False)).specs, 1, 1))
        running = asyncio.create_task(connection.run())
        failed = await until_async(context.inbox.pop, "the end")
        assert isinstance(failed, Failed)
        assert "no room for a version" in str(failed.error)
        await asyncio.wait_for(running, 10.0)

    asyncio.run(run())
