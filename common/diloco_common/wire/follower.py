"""Follows the announcements of a shard or a mirror. It starts with the current versions, also after a broken stream.

It never goes back: a shard whose epoch is from before a standby's promotion counts as away. If it has no time for all
versions, it skips to the newest. Callers that pull a version read it with `read_version`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple, Protocol

from diloco_common.codec import Chunk, Payload, PayloadReceiver
from diloco_common.errors import BadRequest, DilocoError, VersionGone, refusal_from
from diloco_common.observe.logs import Log
from diloco_common.ports import Transport, World
from diloco_common.trust.identity import Identity
from diloco_common.wire.calls import CALL_S, SAY_EVERY_S, SILENCE_HEARTBEATS, backoff_s
from diloco_common.wire.messages import (
    PROTOCOL,
    Committed,
    Directive,
    Evicted,
    FollowRequest,
    JoinAnswer,
    JoinRequest,
    Newest,
    PullHeader,
    PullRequest,
    VersionId,
    check_no_way_back,
)


class Behind(NamedTuple):
    """How far a follower is behind the announcements."""

    versions: int
    seconds: float
    """Time since it first lacked one of these versions, or last heard anything."""


class Keeps(Protocol):
    def joined(self, answer: JoinAnswer) -> None:
        """Called when the shard has described the run. Raises DilocoError."""

    def hear(self, directive: Directive) -> None:
        """Called with any other message of the shard."""

    async def take(self, committed: Committed) -> None:
        """Get this version. Raises Refusal, Unavailable, OSError; VersionGone if there is a newer one."""


class Follower:
    """Owned by one event loop."""

    def __init__(self, transport: Transport, caller: Identity, request: FollowRequest, world: World, log: Log) -> None:
        self.transport, self.caller = transport, caller
        self.answer: JoinAnswer | None = None
        """The shard's latest description of the run."""
        self.is_up = False
        self.skipped = 0
        """Versions that were announced but not taken, because newer ones came first."""
        self.held: dict[int, VersionId] = {}
        """Fragment -> version taken last."""
        self.request, self._world, self._log = request, world, log
        self._announced: dict[int, VersionId] = {}
        self._waiting: Newest[Committed] = Newest()
        self._lacks_since: dict[int, float] = {}
        self._heard_at = world.clock()
        self._news = asyncio.Event()

    @property
    def behind(self) -> Behind:
        versions = max((self._lacks(i) for i in self._announced), default=0)
        since = min([*self._lacks_since.values(), *([] if self.is_up else [self._heard_at])], default=None)
        return Behind(versions, 0.0 if since is None else self._world.clock() - since)

    async def run(self, keeps: Keeps) -> None:
        taking = asyncio.create_task(self._take_all(keeps), name="taking versions")
        attempt, said_at = 0, -SAY_EVERY_S
        try:
            while True:
                why: Exception | str = "the stream ended"
                try:
                    await self._follow(keeps)
                except TimeoutError:
                    why = "it is silent"
                except DilocoError as error:
                    why = error
                attempt = 0 if self.is_up else attempt + 1
                self.is_up = False
                if self._world.clock() - said_at >= SAY_EVERY_S:
                    said_at = self._world.clock()
                    self._log.warning("not following, trying again", why=why, code=getattr(why, "code", None))
                await asyncio.sleep(backoff_s(attempt, self._world.random.random()))
        finally:
            taking.cancel()

    async def _follow(self, keeps: Keeps) -> None:
        """One stream. Raises DilocoError, TimeoutError."""
        answer = await self.transport.join(self.caller, JoinRequest(PROTOCOL, "", observe=True), CALL_S)
        check_no_way_back(answer, 0 if self.answer is None else self.answer.epoch)
        keeps.joined(answer)
        self.answer = answer
        stream = self.transport.follow(self.caller, self.request)
        try:
            while True:
                async with asyncio.timeout(SILENCE_HEARTBEATS * answer.heartbeat_s):
                    directive = await stream.hear()
                self._heard_at = self._world.clock()
                if not self.is_up:
                    self.is_up = True
                    self._log.event("following", epoch=answer.epoch, index=answer.shard_index)
                match directive:
                    case None:
                        return
                    case Committed():
                        self._hear(directive)
                    case Evicted():
                        raise refusal_from(directive.code, directive.message)
                    case _:
                        keeps.hear(directive)
        finally:
            stream.cancel()

    def _hear(self, committed: Committed) -> None:
        fragment_id, version = committed.fragment_id, VersionId(committed.epoch, committed.version)
        self._announced[fragment_id] = version
        if self.held.get(fragment_id) != version:
            self._lacks_since.setdefault(fragment_id, self._world.clock())
            self._waiting.put(fragment_id, Committed, committed)
            self._news.set()

    async def _take_all(self, keeps: Keeps) -> None:
        attempt = 0
        while True:
            await self._news.wait()
            if not self._waiting:
                self._news.clear()
                continue
            committed = self._waiting.take()
            fragment_id, version = committed.fragment_id, VersionId(committed.epoch, committed.version)
            try:
                await keeps.take(committed)
                attempt = 0
            except VersionGone:
                continue
            except Exception as error:
                self._log.warning("version not taken, trying again", fragment=fragment_id, why=error)
                if self._announced.get(fragment_id) == version:
                    self._waiting.put(fragment_id, Committed, committed)
                await asyncio.sleep(backoff_s(attempt, self._world.random.random()))
                attempt += 1
                continue
            before = self.held.get(fragment_id)
            if before is not None and before.epoch == version.epoch and version.version > before.version + 1:
                self.skipped += version.version - before.version - 1
                self._log.debug("skipped to the newest", fragment=fragment_id, version=version.version)
            self.held[fragment_id] = version
            if self._announced.get(fragment_id) == version:
                self._lacks_since.pop(fragment_id, None)
            else:
                self._lacks_since[fragment_id] = self._world.clock()

    def _lacks(self, fragment_id: int) -> int:
        announced, held = self._announced[fragment_id], self.held.get(fragment_id)
        if held is None or held.epoch != announced.epoch:
            return int(held != announced)
        return max(0, announced.version - held.version)


async def read_version(
    answer: AsyncGenerator[PullHeader | Chunk, None], request: PullRequest, num_elements: int,
    heard: Callable[[], None] = lambda: None,
) -> tuple[PullHeader, Payload | None]:  # fmt: skip
    """Read the answer to a Pull, and close it. There is no payload if the caller already has that version.

    `heard` is called for the header and for each chunk. Raises Unavailable, or a Refusal of the call or of the answer.
    """
    async with aclosing(answer) as parts:
        header = await anext(parts, None)
        if not isinstance(header, PullHeader):
            raise BadRequest("the shard answered Pull without a header")
        if header.fragment_id != request.fragment_id:
            raise BadRequest(f"the shard answered with fragment {header.fragment_id}, not {request.fragment_id}")
        heard()
        if header.payload is None:
            return header, None
        if header.payload.num_elements != num_elements:
            raise BadRequest(
                f"fragment {header.fragment_id} has {header.payload.num_elements} elements, not {num_elements}"
            )
        have = request.have[1] if request.have is not None else None
        if header.base_version is not None and header.base_version != have:
            raise BadRequest(
                f"fragment {header.fragment_id} arrived as a change since version {header.base_version}, "
                "but the caller asked for something else"
            )
        receiver = PayloadReceiver(header.payload)
        async for part in parts:
            if isinstance(part, PullHeader):
                raise BadRequest("the shard answered Pull with two headers")
            receiver.add(part)
            heard()
        return header, receiver.finish()
