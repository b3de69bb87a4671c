"""Under which lease a push is sent, when it has to wait for its turn."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from torch import nn

from diloco_common.codec import Payload
from diloco_common.errors import Busy, DilocoError, Unavailable
from diloco_common.trust.identity import Identity
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import TRANSFERS_AT_ONCE, Collect, LearnerPolicy, Outcome, PushAnswer, PushHeader
from diloco_worker.core.connection import ConnectionState
from diloco_worker.core.events import OfferSeed, PushContribution
from diloco_worker.core.fragment import PendingContribution
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.shell.pusher import FAILING_S, Pusher
from parts import CALLER, Parts, joined
from waiting import until_async

EPOCH = 7
FRAGMENTS = TRANSFERS_AT_ONCE + 1
POLICY = LearnerPolicy(1, "float32", "float32")


class Shard:
    """Answers pushes once it is let."""

    def __init__(self) -> None:
        self.pushed: list[tuple[Identity, PushHeader]] = []
        self.may_answer = asyncio.Event()
        self.fails_with: DilocoError | None = None

    async def push(self, caller: Identity, header: PushHeader, payload: Payload, timeout_s: float) -> PushAnswer:
        self.pushed.append((caller, header))
        if self.fails_with is not None and header.fragment_id == 0:
            raise self.fails_with
        await self.may_answer.wait()
        return PushAnswer(Outcome.ACCEPTED)


class Rig:
    """The pusher of a connection, and a learner that has more to push than goes at once."""

    def __init__(self) -> None:
        self.shard = Shard()
        parts = Parts(encodes_at_once=True)
        self.clock, self.context = parts.clock, parts.context()
        model = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(FRAGMENTS))
        replica = Replica(model)
        self.core = LearnerCore(replica, cut(replica.specs, FRAGMENTS, 1), POLICY)
        self.context.codec.own({i: f.tensors for i, f in self.core.fragments.items()})
        self.state = ConnectionState(CALLER, "shard")
        self.joins(EPOCH)
        self.state.manifest = self.core.manifest
        transport: Any = self.shard
        self.pusher = Pusher(self.state, transport, self.context)

    def joins(self, epoch: int, generation: int = 1) -> None:
        self.state.take_lease(joined(epoch, POLICY, generation=generation, num_fragments=FRAGMENTS))

    def pushes(self, value: float = 0.0) -> list[PendingContribution]:
        """A contribution to each fragment; `value` is in each of them."""
        for i in self.core.fragments:
            self.core.arrived(i, 0, EPOCH, torch.zeros(2), 0)
            self.core.collect(Collect(i, 1, EPOCH), EPOCH)
        self.core.stepped(1)
        taken = self.core.contribute()
        for contribution in taken:
            contribution.tensors.take_snapshot().add_(value)
            self.context.codec.begin(contribution, "float32")
            self.pusher.push(PushContribution(contribution))
        return taken

    def seeds(self) -> None:
        for i, fragment in self.core.fragments.items():
            self.pusher.seed(OfferSeed(i, fragment.tensors.values(), 0.0))


async def test_what_waits_for_its_turn_is_not_pushed_into_the_next_epoch_of_the_shard() -> None:
    """When the learner joined that epoch, the work was given back: it would count twice."""
    rig = Rig()
    rig.pushes()
    await until_async(lambda: len(rig.shard.pushed) == TRANSFERS_AT_ONCE, "as many pushes as go at once")
    rig.joins(EPOCH + 1)
    rig.shard.may_answer.set()
    await rig.pusher.settle(10.0)
    assert len(rig.shard.pushed) == TRANSFERS_AT_ONCE
    assert {(caller.epoch, caller.generation) for caller, _ in rig.shard.pushed} == {(EPOCH, 1)}
    assert rig.context.inbox.pop() is None, "and no answer of the earlier epoch counts"


@pytest.mark.parametrize(("value", "may_have_arrived"), [(1.0, True), (math.nan, False)])
async def test_a_shard_cannot_have_forgotten_values_that_were_never_sent(value: float, may_have_arrived: bool) -> None:
    """Else what is not finite would be taken for merged, and be in the model with the next version."""
    rig = Rig()
    taken = rig.pushes(value)
    rig.shard.may_answer.set()
    await rig.pusher.settle(10.0)
    assert len(rig.shard.pushed) == FRAGMENTS
    assert {contribution.pushes.may_have_arrived for contribution in taken} == {may_have_arrived}


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("unknown: Received http2 header with status: 413"),
        Unavailable("deadline_exceeded: Deadline Exceeded"),
        Busy("6 uploads are under way"),
    ],
)
async def test_pushes_that_fail_are_said_after_a_minute_and_then_now_and_then(
    error: DilocoError, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.shard.fails_with = error
    rig.shard.may_answer.set()
    rig.pushes()
    await until_async(lambda: rig.pusher.failing.why, "one has failed, and the others are answered")
    for seconds, times in ((0.0, 0), (FAILING_S + 1, 1), (1.0, 1), (FAILING_S, 2)):
        rig.clock.now += seconds
        rig.pusher.say_what_fails()
        assert caplog.text.count("PUSHES_FAIL") == times
    assert str(error) in caplog.text
    rig.shard.fails_with = None
    await until_async(lambda: not rig.pusher.failing.why, "it gets through")
    rig.clock.now += 2 * FAILING_S
    rig.pusher.say_what_fails()
    assert caplog.text.count("PUSHES_FAIL") == 2
    await rig.pusher.settle(10.0)


async def test_a_seed_is_offered_under_the_lease_that_it_was_asked_under() -> None:
    rig = Rig()
    rig.seeds()
    await until_async(lambda: rig.shard.pushed, "a first seed")
    at_once = len(rig.shard.pushed)
    rig.joins(EPOCH, generation=2)
    rig.shard.may_answer.set()
    await rig.pusher.settle(10.0)
    assert len(rig.shard.pushed) == at_once
    assert {(header.epoch, caller.generation) for caller, header in rig.shard.pushed} == {(EPOCH, 1)}
