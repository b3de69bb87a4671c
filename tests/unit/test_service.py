"""A shard's service speaks plain values: the same calls as over the network, in one event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch

from builders import decoded, make_settings
from diloco_common.codec import Chunk, Payload, encode_payload, encoding_names
from diloco_common.errors import BadRequest, Busy, Draining, NotJoined, Superseded, TornUpload
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.trust.identity import Identity, Proof, Scope, Subject
from diloco_common.wire.manifest import Manifest, TensorSpec, cut
from diloco_common.wire.messages import (
    PROTOCOL,
    FollowRequest,
    JoinRequest,
    Outcome,
    Progress,
    PullHeader,
    PullRequest,
    PushAnswer,
    PushHeader,
    Range,
    Role,
)
from diloco_server.shell import pulls, quotas, waits
from diloco_server.shell import service as module
from diloco_server.shell.host import ShardHost
from diloco_server.shell.server import real_world
from diloco_server.shell.service import Service
from diloco_server.storage.store import MemoryStore
from diloco_server.storage.version_file import StoredVersion
from waiting import until_async

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

    def supersede(self, epoch: int) -> None:
        if self.is_full:
            raise OSError("no space left on device")
        super().supersede(epoch)


class Rig:
    """A real host, and learners that call its service."""

    def __init__(self, pull: str, **sections: dict[str, Any]) -> None:
        settings = make_settings(sync={"sync_every": 1, "quorum": "all", "pull": pull}, **sections)
        self.store = Disk(EPOCH)
        self.host = ShardHost(
            settings, self.store, real_world(), metrics=ShardMetrics(), log=Log("test"), clock=lambda: 0.0
        )
        self.service = Service(self.host)

    async def join(self, name: str = "ann") -> Identity:
        answer = await self.service.join(Identity("local", name), JOIN)
        return Identity("local", name, answer.generation, answer.epoch)

    async def push(self, caller: Identity, round_number: int, chunks: int | None = None) -> PushAnswer:
        """Push a seed (round 0) or a contribution; only so many `chunks` of it."""
        payload = encode_payload(torch.ones(SIZE), "float32", chunk_elements=256)
        tokens = round_number and 10
        header = PushHeader(0, round_number, EPOCH, 0, tokens, tokens, payload.header, DIGEST)
        return await self.service.push(caller, parts([header, *payload.chunks[:chunks]]))

    async def push_slowly(self, caller: Identity, stop: asyncio.Event, *, drips: bool = False) -> PushAnswer:
        """Push a seed of many chunks: its header, and then nothing, or a chunk from time to time until `stop`."""
        payload = encode_payload(torch.ones(SIZE), "float32", chunk_elements=256)

        async def sent() -> AsyncIterator[PushHeader | Chunk]:
            yield PushHeader(0, 0, EPOCH, 0, 0, 0, payload.header, DIGEST)
            for chunk in payload.chunks if drips else ():
                await asyncio.sleep(0.15)
                yield chunk
            await stop.wait()

        return await self.service.push(caller, sent())

    async def pull(
        self, caller: Identity, *encodings: str, have: tuple[int, int] | None = None, **more: Any
    ) -> tuple[PullHeader, list[Chunk]]:
        header, *chunks = [p async for p in self.service.pull(caller, PullRequest(0, encodings, have, **more))]
        return header, chunks

    async def seeded(self) -> Identity:
        caller = await self.join()
        assert (await self.push(caller, 0)).outcome is Outcome.ACCEPTED
        await until_async(lambda: self.host.shard.versions.all_seeded, "version 0")
        return caller


async def parts(values: Sequence[PushHeader | Chunk]) -> AsyncIterator[PushHeader | bytes]:
    for value in values:
        yield value


RigOf: TypeAlias = Callable[..., Rig]


@pytest.fixture
def rig_of() -> Iterator[RigOf]:
    rigs: list[Rig] = []

    def made(pull: str = "float32", **sections: dict[str, Any]) -> Rig:
        rigs.append(Rig(pull, **sections))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.host.close()


@pytest.fixture
def rig(rig_of: RigOf) -> Rig:
    return rig_of()


async def counted(reports: int, taken: list[int]) -> AsyncIterator[Progress]:
    """So many reports, one right after the other, and those of them that were asked for."""
    for step in range(reports):
        taken.append(step)
        yield Progress(step, 10 * step)
    await asyncio.Event().wait()


async def test_a_flood_of_reports_is_not_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Turns", lambda per_s, _: waits.Turns(per_s / 1e5, 3))
    taken: list[int] = []
    async with aclosing(rig.service.attend(await rig.seeded(), counted(1000, taken))) as directives:
        await anext(directives)
        await until_async(lambda: len(taken) >= 4, "the first ones")
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(taken) == 4, "the next one has to wait"


async def test_what_proves_the_holders_of_leases_is_kept_while_they_last(rig: Rig) -> None:
    callers = {
        name: Identity("local", name, proof=Proof(Subject("local", Scope.LEARNER, name), serial, math.inf))
        for name, serial in (("ann", "a1"), ("bob", "b1"))
    }
    first = await rig.service.join(callers["ann"], JOIN)
    (lease,) = rig.service.leases_of({"a1", "c1"})
    assert (lease.learner_id, lease.generation) == ("ann", first.generation)

    await rig.service.leave(replace(lease, epoch=EPOCH))
    await rig.service.join(callers["bob"], JOIN)
    assert rig.service.leases_of({"a1"}) == []
    assert len(rig.service.leases_of({"b1"})) == 1


async def test_a_push_without_a_lease_is_refused_before_a_byte_of_it_is_read(rig: Rig) -> None:
    async def unread() -> AsyncIterator[PushHeader | Chunk]:
        raise AssertionError("read")
        yield b""

    with pytest.raises(NotJoined):
        await rig.service.push(Identity("local", "ann", 1, EPOCH), unread())


async def test_a_fragment_is_taken_from_one_learner_at_a_time_and_then_from_the_next(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learners that start together all offer the whole model. A few seeds come in at once, each fragment once."""
    ann, bob = await rig.join(), await rig.join("bob")
    slow = asyncio.create_task(rig.push_slowly(ann, asyncio.Event()))
    await until_async(lambda: rig.service._seeding, "its header")
    with pytest.raises(Busy, match="others are sending 1 fragments"):
        await rig.push(bob, 0)
    slow.cancel()
    await until_async(lambda: not rig.service._seeding, "its end")
    monkeypatch.setattr(module, "SEEDS_AT_ONCE", 0)
    with pytest.raises(Busy):
        await rig.push(bob, 0)
    monkeypatch.undo()
    assert (await rig.push(bob, 0)).outcome is Outcome.ACCEPTED


async def test_a_push_has_to_keep_pace_although_each_chunk_comes_soon(rig_of, monkeypatch) -> None:
    monkeypatch.setattr(waits, "SLOWEST_BYTES_PER_S", 1e12)
    rig = rig_of(lease={"lease_s": 0.2, "heartbeat_s": 0.1})
    ann = await rig.join()
    with pytest.raises(TornUpload, match="too slowly"):
        await rig.push_slowly(ann, asyncio.Event(), drips=True)
    assert rig.host.telemetry.bytes_pushed < 4 * SIZE, "it was not waited for to the end"


async def test_one_host_leaves_leases_to_others(rig_of: RigOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOST_LEARNERS", 2)
    rig = rig_of(shard={"max_learners": 4})
    await rig.service.join(Identity("local", "ann", peer="ipv4:10.0.0.1"), JOIN)
    await rig.service.join(Identity("local", "ben", peer="ipv4:10.0.0.1"), JOIN)
    with pytest.raises(Busy, match=r"2 learners from ipv4:10\.0\.0\.1 .*half of shard\.max_learners"):
        await rig.service.join(Identity("local", "cat", peer="ipv4:10.0.0.1"), JOIN)
    await rig.service.join(Identity("local", "ben", peer="ipv4:10.0.0.1"), JOIN)  # again
    await rig.service.join(Identity("local", "cat", peer="ipv4:10.0.0.2"), JOIN)
    proof = Proof(Subject("local", Scope.LEARNER, "dan"), "1", 0.0)
    await rig.service.join(Identity("local", "dan", peer="ipv4:10.0.0.1", proof=proof), JOIN)


async def test_an_observer_that_waits_for_a_version_hears_of_the_end(rig_of: RigOf) -> None:
    """The disk is full, so the version is never announced."""
    rig = rig_of(pull="bfloat16")
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


async def test_a_shard_that_is_replaced_while_its_disk_is_full_asks_to_be_told_again(rig_of: RigOf) -> None:
    rig = rig_of()
    rig.store.is_full = True
    with pytest.raises(Busy, match="cannot be marked as replaced"):
        await rig.host.supersede(FollowRequest(Role.STANDBY, epoch=EPOCH + 1))
    rig.store.is_full = False
    with pytest.raises(Superseded):
        await rig.host.supersede(FollowRequest(Role.STANDBY, epoch=EPOCH + 1))


async def test_a_shard_sends_the_ranges_that_are_asked_for(rig: Rig) -> None:
    ann, ranges = await rig.seeded(), (Range(0, 1), Range(2, SIZE))
    header, _ = await rig.pull(ann, ranges=ranges)
    assert (header.ranges, header.payload.num_elements) == (ranges, SIZE)
    with pytest.raises(BadRequest, match=f"a range ends at element {SIZE + 1} of {SIZE}"):
        await rig.pull(ann, ranges=(Range(0, SIZE + 1),))


async def test_ranks_of_one_learner_have_so_many_pulls_together(rig_of: RigOf) -> None:
    rig = rig_of(shard={"max_pushes": 8})
    ann = await rig.seeded()
    asked = PullRequest(0, ranges=(Range(0, 1),))
    opened = [rig.service.pull(replace(ann, rank=rank), asked) for rank in range(1, 5)]
    for pull in opened:
        await anext(pull)
    with pytest.raises(Busy, match="4 pulls of ranks of ann are open"):
        await rig.pull(replace(ann, rank=5), ranges=asked.ranges)
    await rig.pull(ann, ranges=asked.ranges)
    await opened[0].aclose()
    await rig.pull(replace(ann, rank=5), ranges=asked.ranges)
    for pull in opened:
        await pull.aclose()


async def test_who_has_not_shown_that_it_reads_is_given_small_chunks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name in ((quotas, "SHOWN_BYTES"), (pulls, "SHOWN_BYTES"), (pulls, "SMALL_CHUNK_BYTES")):
        monkeypatch.setattr(where, name, 1024)
    ann = await rig.seeded()
    small, whole = await rig.pull(ann), await rig.pull(ann)
    assert (len(small[1]), len(whole[1])) == (-(-4 * SIZE // 1024), 1)
    for header, chunks in (small, whole):
        assert torch.equal(decoded(Payload(header.payload, tuple(chunks))), torch.ones(SIZE))
