"""What a learner says that it holds: what it pulled last, whatever it asks for next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from diloco_common import errors
from diloco_common.codec import encode_payload
from diloco_common.codec.parts import sha256
from diloco_common.errors import Refusal
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Held, LearnerPolicy, Near, PullHeader, PullRequest
from diloco_worker.core.connection import AndTell, ConnectionState, ToPull
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.shell import puller as module
from diloco_worker.shell.codec_thread import CodecThread
from diloco_worker.shell.puller import Puller
from parts import CALLER, Parts, joined
from waiting import until_async

EPOCH = 7
POLICY = LearnerPolicy(4, "int8", "int8")
NOTHING, FIRST = None, (EPOCH, 1)
ANOTHER = 99
"""A version that comes as one of another fragment than was asked for."""


class Shard:
    """Answers each pull in turn: with the values of that version, or with a refusal."""

    def __init__(self, *answers: int | Refusal) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, int] | None] = []
        """What each pull said that the learner has."""
        self.held: list[tuple[Held, ...]] = []
        """What a Join would have said when each pull was made."""
        self.codec: CodecThread

    async def pull(self, caller: Any, request: PullRequest, timeout_s: float) -> AsyncGenerator[Any, None]:
        self.asked.append(request.have)
        self.held.append(self.codec.held([0]))
        answer = self.answers.pop(0)
        if isinstance(answer, Refusal):
            raise answer
        payload = encode_payload(torch.zeros(4), "bfloat16")
        fragment_id = request.fragment_id if answer != ANOTHER else 1
        yield PullHeader(fragment_id, answer, EPOCH, 0, 0, 0, payload.header)
        for chunk in payload.chunks:
            yield chunk


def pulled(shard: Shard, *announced: int, mirror: Shard | None = None) -> tuple[ConnectionState, CodecThread]:
    """Announce these versions, each once the one before is there. `mirror`: of the site of an island's leader."""

    async def run() -> tuple[ConnectionState, CodecThread]:
        context = Parts(encodes_at_once=True).context()
        replica = Replica(nn.Linear(2, 2, bias=False))
        manifest = cut(replica.specs, 1, 1)
        core = LearnerCore(replica, manifest, POLICY)
        context.codec.own({0: core.fragments[0].tensors})
        state = ConnectionState(CALLER, "shard", ToPull() if mirror is None else AndTell())
        state.take_lease(joined(EPOCH, POLICY))
        state.manifest = manifest
        shard.codec = context.codec
        transport: Any = shard
        puller = Puller(state, transport, replace(context, dial=lambda address: mirror))
        running = asyncio.create_task(puller.run())
        for version in announced:
            if mirror is not None:
                mirror.codec, values = context.codec, encode_payload(torch.zeros(4), "bfloat16")
                puller.near[0] = Near("mirror", sha256(values), b"", PullHeader(0, version, EPOCH, 0, 0, 0, None))
            state.to_pull.announced(0, (EPOCH, version))
            puller.wake()
            arrived = await until_async(context.inbox.pop, f"version {version}")
            assert arrived.version == version
        running.cancel()
        return state, context.codec

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def tries_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "backoff_s", lambda *_: 0.0)


OF_THE_BYTES = [errors.BadChecksum("damaged"), errors.BadPayload("too few"), errors.UnknownEncoding("not known")]
OF_THE_CALL = [
    errors.StaleGeneration("cat", 1, 2),
    errors.Draining("shutting down"),
]
ONE = (Held(0, EPOCH, 1),)


@pytest.mark.parametrize(
    ("refused", "asked"),
    [
        (None, [NOTHING, FIRST]),
        *((error, [NOTHING, FIRST, NOTHING]) for error in OF_THE_BYTES),
        *((error, [NOTHING, FIRST, FIRST]) for error in OF_THE_CALL),
    ],
)
def test_the_next_version_is_asked_for_as_a_change_unless_the_bytes_of_one_were_of_no_use(
    refused: Refusal | None, asked: list[tuple[int, int] | None]
) -> None:
    """The learner's anchor is what it was. A shard that comes back without that version must hear of it. Where the call
    was refused nothing came, so nothing is wrong with what is held."""
    shard = Shard(1, *([] if refused is None else [refused]), 2)
    _, codec = pulled(shard, 1, 2)
    assert codec.held([0]) == (Held(0, EPOCH, 2),)
    assert shard.asked == asked
    assert shard.held == [(), *[ONE] * (len(asked) - 1)]


def test_a_version_of_another_fragment_than_was_asked_for_is_asked_for_again() -> None:
    shard = Shard(ANOTHER, 1)
    _, codec = pulled(shard, 1)
    assert codec.held([0]) == (Held(0, EPOCH, 1),)
    assert shard.asked == [NOTHING, NOTHING]


def test_the_leader_of_an_island_pulls_from_the_shard_which_holds_the_version_for_its_ranks() -> None:
    shard, mirror = Shard(1), Shard(1)
    pulled(shard, 1, mirror=mirror)
    assert (shard.asked, mirror.asked) == ([NOTHING], [])
