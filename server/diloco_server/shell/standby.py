"""A standby: copies a shard's version files as they are written, until it is promoted. It serves no one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TypeVar

from diloco_common.codec.frames import crc32c, said_crc32c
from diloco_common.errors import BadChecksum, BadRequest, Refusal, Superseded, Unavailable, VersionGone
from diloco_common.observe.logs import Log
from diloco_common.ports import Transport
from diloco_common.trust.identity import Identity
from diloco_common.wire.calls import CALL_S, call_s
from diloco_common.wire.follower import Follower
from diloco_common.wire.messages import (
    FILE,
    Committed,
    Directive,
    Evicted,
    FollowRequest,
    JoinAnswer,
    PullHeader,
    PullRequest,
    Role,
)
from diloco_server.shell.access import LOOK_S
from diloco_server.shell.host import ShardHost
from diloco_server.storage.standby import StandbyFolder
from diloco_server.storage.store import check_origin
from diloco_server.storage.version_file import Origin

TELL_S = 1.0
"""How often a promoted shard tries to reach the one it replaces."""

T = TypeVar("T")


async def tell_replaced(host: ShardHost, transport: Transport, caller: Identity) -> Superseded:
    """Tell the replaced shard so, until it has heard or says that this one is replaced."""
    request = FollowRequest(Role.STANDBY, epoch=host.shard.epoch, tokens_merged=host.shard.tokens_merged)
    while True:
        try:
            async with asyncio.timeout(TELL_S):
                answer = await transport.follow(caller, request).hear()
            if isinstance(answer, Evicted):
                return host.end_as_replaced(answer.message)
        except Superseded as told:
            host.log.error("the replaced shard has ended", why=told, code=told.code)
            return told
        except (Refusal, Unavailable, TimeoutError):
            pass
        await asyncio.sleep(TELL_S)


class Standby:
    """Copies the files of one shard. Owned by one event loop."""

    def __init__(self, follower: Follower, folder: StandbyFolder, origin: Origin, disk: Executor, log: Log) -> None:
        """`origin`: from the settings; it must equal the shard's, or the shard could not continue from these files."""
        self.follower = follower
        self.num_fragments = 0
        self.bytes_saved = 0
        self._folder, self._origin, self._disk, self._log = folder, origin, disk, log
        self._epoch = 0

    async def run(self) -> None:
        """Raises OSError."""
        self.follower.held |= await self._do(self._folder.newest)
        following = asyncio.create_task(self.follower.run(self), name="following")
        try:
            while not await self._do(self._folder.look):  # noqa: ASYNC110 - a folder sends no event
                await asyncio.sleep(LOOK_S)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def ready(self) -> tuple[bool, str]:
        """Whether it can be promoted, and why not."""
        if len(self.follower.held) < max(1, self.num_fragments):
            return False, f"it holds {len(self.follower.held)} of {self.num_fragments or 'all'} fragments"
        return True, "standing by"

    def joined(self, answer: JoinAnswer) -> None:
        self.num_fragments, self._epoch = len(answer.fragments), answer.epoch
        newest = {status.fragment_id: status.version if status.seeded else -1 for status in answer.fragments}
        self._disk.submit(self._folder.drop_later, newest)  # before taking any version
        for fragment_id, version in newest.items():
            if fragment_id in self.follower.held and self.follower.held[fragment_id].version > version:
                del self.follower.held[fragment_id]

    def hear(self, directive: Directive) -> None:
        """Ignores all other directives."""

    async def take(self, committed: Committed) -> None:
        """Raises VersionDamaged, WrongFolder."""
        fragment_id, version = committed.fragment_id, committed.version
        request = PullRequest(fragment_id, (FILE,), want=(committed.epoch, version))
        await self._do(partial(self._folder.follows, self._epoch))
        parts = self.follower.transport.pull(self.follower.caller, request, call_s(1 << 40))  # of any size
        async with aclosing(parts):
            header = await anext(parts, None)
            if not isinstance(header, PullHeader) or header.payload is None:
                raise BadRequest("the shard answered Pull without a header")
            left = header.payload.num_bytes
            file = await self._do(partial(self._folder.begin, fragment_id, version))
            try:
                async for part in parts:
                    if isinstance(part, PullHeader) or len(part) > left:
                        raise BadRequest("more came than was announced")
                    if said_crc32c(part) not in (None, crc32c(part)):
                        raise BadChecksum(f"version {version} of fragment {fragment_id} changed on the way")
                    await self._do(partial(file.write, memoryview(part)))
                    left -= len(part)
                if left:
                    raise VersionGone(f"version {version} of fragment {fragment_id} stopped before all was there")
            except BaseException:
                file.close()
                raise
            found = await self._do(partial(self._folder.end, file, fragment_id, version))
        self.bytes_saved += header.payload.num_bytes
        check_origin(self._origin, found)
        with contextlib.suppress(Refusal, Unavailable):  # the shard is away, or has newer versions
            has = replace(request, have=request.want)
            async with aclosing(self.follower.transport.pull(self.follower.caller, has, CALL_S)) as said:
                await anext(said, None)

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)
