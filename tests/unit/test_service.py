"""A shard's service speaks plain values: the same calls as over the network, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from builders import make_settings
from diloco_common.codec import encode_payload, encoding_names
from diloco_common.errors import (
    BadRequest,
    Busy,
    Draining,
    NotJoined,
    ProtocolMismatch,
    Refusal,
    TornUpload,
    UnknownEncoding,
)
from diloco_common.identity import Identity
from diloco_common.logs import Log
from diloco_common.manifest import Manifest, TensorSpec, cut
from diloco_common.messages import (
    Collect,
    Committed,
    Directive,
    JoinRequest,
    Outcome,
    Progress,
    PullHeader,
    PullRequest,
    PushAnswer,
    PushHeader,
)
from diloco_common.metrics import ShardMetrics
from diloco_common.protocol import PROTOCOL
from diloco_server import service as module
from diloco_server.host import ShardHost
from diloco_server.server import real_world
from diloco_server.service import Service
from diloco_server.storage.store import MemoryStore
from diloco_server.storage.version import StoredVersion
from waiting import DEADLINE_S, until_async

EPOCH = 7
SIZE = 600
MODEL = (TensorSpec("w", (SIZE,)),)
DIGEST = cut(MODEL, 1, 1).digest
JOIN = JoinRequest(PROTOCOL, "process", MODEL, encoding_names())
OBSERVER = Identity("local")


class Disk(MemoryStore):
    is_full = False

    def save(self, version: StoredVersion, manifest: Manifest) -> int:
        if self.is_full:
            raise OSError("no space left on device")
        return super().save(version, manifest)


class Rig:
    """A real host, and learners that call its service."""

    def __init__(self, pull: str) -> None:
        settings = make_settings(sync={"sync_every": 1, "quorum": "all", "pull": pull})
        self.store = Disk(EPOCH)
        self.host = ShardHost(
            settings, self.store, real_world(), metrics=ShardMetrics(), log=Log("test"), clock=lambda: 0.0
        )
        self.service = Service(self.host)

    async def join(self) -> Identity:
        answer = await self.service.join(Identity("local", "ann"), JOIN)
        return Identity("local", "ann", answer.generation, answer.epoch)

    async def push(self, caller: Identity, round_number: int, chunks: int | None = None) -> PushAnswer:
        """Push a seed (round 0) or a contribution; only so many `chunks` of it."""
        payload = encode_payload(torch.ones(SIZE), "float32", chunk_elements=256)
        tokens = round_number and 10
        header = PushHeader(0, round_number, EPOCH, 0, tokens, tokens, payload.header, DIGEST)
        return await self.service.push(caller, parts([header, *payload.chunks[:chunks]]))

    async def pull(
        self, caller: Identity, *encodings: str, have: tuple[int, int] | None = None
    ) -> list[PullHeader | bytes]:
        return [part async for part in self.service.pull(caller, PullRequest(0, encodings, have))]

    async def seeded(self) -> Identity:
        caller = await self.join()
        assert (await self.push(caller, 0)).outcome is Outcome.ACCEPTED
        await until_async(lambda: self.host.shard.all_seeded, "version 0")
        return caller


async def parts(values: Sequence[PushHeader | bytes]) -> AsyncIterator[PushHeader | bytes]:
    for value in values:
        yield value


def run(play: Callable[[Rig], Coroutine[Any, Any, None]], pull: str = "float32") -> None:
    """Play a test on a shard of its own, with a deadline."""

    async def bounded() -> None:
        rig = Rig(pull)
        async with asyncio.timeout(DEADLINE_S):
            await play(rig)
        rig.host.close()

    asyncio.run(bounded())


def test_a_learner_joins_seeds_contributes_pulls_and_leaves() -> None:
    async def play(rig: Rig) -> None:
        ann = await rig.seeded()
        reports: asyncio.Queue[Progress] = asyncio.Queue()

        async def reported() -> AsyncIterator[Progress]:
            while True:
                yield await reports.get()

        directives = rig.service.attend(ann, reported())
        heard: list[Directive] = []
        for step in (0, 1):
            reports.put_nowait(Progress(step, 10 * step))
        while not any(isinstance(directive, Collect) for directive in heard):
            heard.append(await anext(directives))
        assert (await rig.push(ann, 1)).outcome is Outcome.ACCEPTED
        while Committed(0, 1, EPOCH) not in heard:
            heard.append(await anext(directives))
        await directives.aclose()
        assert len(rig.host.streams) == 0

        header, *chunks = await rig.pull(ann)
        assert isinstance(header, PullHeader)
        assert (header.version, header.merged_version, header.tokens_merged) == (1, 1, 10)
        assert sum(len(chunk) for chunk in chunks if isinstance(chunk, bytes)) == 4 * SIZE
        (again,) = await rig.pull(ann, have=(EPOCH, 1))
        assert isinstance(again, PullHeader)
        assert again.payload is None, "it has this version"

        await rig.service.leave(ann)
        await rig.service.leave(ann)
        assert not rig.host.shard.membership.live()

    run(play)


@pytest.mark.parametrize(
    ("changes", "refused", "words"),
    [
        ({"protocol": PROTOCOL + 1}, ProtocolMismatch, "install equal versions"),
        ({"process_id": "p" * 65}, BadRequest, "process_id has 65 characters"),
        ({"decodes": ("int4",)}, UnknownEncoding, "the learner decodes int4"),
    ],
)
def test_who_cannot_take_part_is_told_why(changes: dict[str, Any], refused: type[Refusal], words: str) -> None:
    async def play(rig: Rig) -> None:
        with pytest.raises(refused, match=words):
            await rig.service.join(Identity("local", "ann"), replace(JOIN, **changes))
        assert rig.host.shard.membership.all() == []

    run(play)


def test_a_push_without_a_lease_is_refused_before_a_byte_of_it_is_read() -> None:
    async def play(rig: Rig) -> None:
        async def unread() -> AsyncIterator[PushHeader | bytes]:
            raise AssertionError("read")
            yield b""

        with pytest.raises(NotJoined):
            await rig.service.push(Identity("local", "ann", 1, EPOCH), unread())

    run(play)


def test_a_push_that_breaks_off_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEEDS_AT_ONCE", 1)

    async def play(rig: Rig) -> None:
        ann = await rig.join()
        for _ in range(2):
            with pytest.raises(TornUpload):
                await rig.push(ann, 0, chunks=1)
        assert (await rig.push(ann, 0)).outcome is Outcome.ACCEPTED

    run(play)


def test_a_pull_that_is_closed_early_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OBSERVERS_AT_ONCE", 1)

    async def play(rig: Rig) -> None:
        await rig.seeded()
        first = rig.service.pull(OBSERVER, PullRequest(0, ("float32",)))
        await anext(first)
        with pytest.raises(Busy):
            await rig.pull(OBSERVER, "float32")
        await first.aclose()
        assert len(await rig.pull(OBSERVER, "float32")) == 2

    run(play, pull="bfloat16")


def test_an_observer_that_waits_for_a_version_hears_of_the_end() -> None:
    """The disk is full, so the version is never announced."""

    async def play(rig: Rig) -> None:
        ann = await rig.seeded()
        rig.store.is_full = True
        for step in (0, 1):
            rig.host.progress(ann, Progress(step, 10 * step))
            rig.host.advance()
        assert (await rig.push(ann, 1)).outcome is Outcome.ACCEPTED
        await until_async(lambda: rig.host.keeper.failing, "the disk to refuse")

        pulling = asyncio.create_task(rig.pull(OBSERVER, "float32"))
        await asyncio.sleep(0)
        assert not pulling.done()
        rig.host.close()
        with pytest.raises(Draining):
            await pulling

    run(play, pull="bfloat16")
