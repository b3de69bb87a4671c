"""What the codec side keeps: a payload until its contribution's fate is known, and the version that was pulled last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, LearnerPolicy
from diloco_worker.core.events import Arrived
from diloco_worker.core.fragment import PendingContribution
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from parts import Parts

EPOCH = 7
POLICY = LearnerPolicy(1, "float32", "float32")


class Rig:
    """A learner of one fragment of two elements, which holds version 0, all 10; its codec jobs wait."""

    def __init__(self) -> None:
        self.parts = Parts()
        self.give_back: Callable[[], None] = lambda: None
        self.parts.world = replace(self.parts.world, give_back=lambda: self.give_back())
        self.codec = self.parts.context().codec
        self.model = nn.ParameterList([nn.Parameter(torch.full((2,), 10.0))])
        replica = Replica(self.model)
        self.core = LearnerCore(replica, cut(replica.specs, 1, 1), POLICY)
        self.codec.own({0: self.core.fragments[0].tensors})
        self.core.arrived(0, 0, EPOCH, torch.full((2,), 10.0), 0)

    def contributes(self, round_number: int = 1, by: float = 1.0) -> PendingContribution:
        """It has trained, a round asks, and the codec thread is to encode."""
        with torch.no_grad():
            self.model[0].add_(by)
        self.core.stepped(1)
        self.core.collect(Collect(0, round_number, EPOCH), EPOCH)
        (contribution,) = self.core.contribute()
        self.codec.begin(contribution, "float32")
        return contribution

    async def done(self, job: Coroutine[Any, Any, Any]) -> Any:
        """What the codec thread makes of it, once it goes on."""
        running = asyncio.ensure_future(job)
        await asyncio.sleep(0)
        self.parts.jobs.run()
        return await running

    def values(self, contribution: PendingContribution) -> list[float] | None:
        """What is to be pushed."""
        payload = asyncio.run(self.codec.payload(contribution))
        return None if payload is None else torch.frombuffer(bytearray(payload.chunks[0]), dtype=torch.float32).tolist()


def arrived(version: int) -> Arrived:
    return Arrived(0, version, EPOCH, torch.zeros(2), 0)


@pytest.mark.parametrize(("version", "is_kept"), [(1, True), (2, False), (3, False)])
def test_a_payload_is_dropped_with_the_version_of_its_round(version: int, is_kept: bool) -> None:
    rig = Rig()
    contribution = rig.contributes(round_number=2)
    rig.parts.jobs.run()
    rig.codec.hold(arrived(version), 0)
    assert (rig.values(contribution) is not None) is is_kept


def test_a_push_that_is_cancelled_leaves_the_job_to_be_done() -> None:
    """The same contribution may be pushed again."""
    rig = Rig()
    contribution = rig.contributes()

    async def push() -> None:
        waiting = asyncio.ensure_future(rig.codec.payload(contribution))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(push())
    rig.parts.jobs.run()
    assert rig.values(contribution) == [-1.0, -1.0]
