"""Processes that read a shard's versions: mirrors and standbys.

A mirror is a host that takes versions from another shard instead of from rounds, and serves Pull and Follow. A standby
copies a shard's version files as they are written, until it is promoted; it serves nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TypeVar

from diloco_common.codec import Payload, encode_payload
from diloco_common.codec.change import decode_version, pull_encodings
from diloco_common.codec.frames import crc32c, said_crc32c
from diloco_common.errors import (
    BadChecksum,
    BadRequest,
    ManifestMismatch,
    Refusal,
    Superseded,
    Unavailable,
    VersionGone,
)
from diloco_common.observe.logs import Log
from diloco_common.ports import Transport
from diloco_common.trust.identity import Identity
from diloco_common.wire.calls import AGAIN_S, CALL_S, LONGEST_S, call_s
from diloco_common.wire.follower import Follower, read_version
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import (
    FILE,
    Committed,
    Directive,
    Evicted,
    FollowRequest,
    JoinAnswer,
    Near,
    PullHeader,
    PullRequest,
    Pulse,
    Role,
    Stop,
)
from diloco_server.core.arithmetic import Published
from diloco_server.core.record import empty_record
from diloco_server.core.shard import MirroredShard
from diloco_server.shell.host import ShardHost
from diloco_server.storage.standby import StandbyFolder
from diloco_server.storage.store import check_origin
from diloco_server.storage.version_file import Origin


class Mirror:
    """Takes versions into a host. Owned by its event loop."""

    def __init__(self, host: ShardHost, follower: Follower) -> None:
        assert isinstance(host.shard, MirroredShard)
        self._host, self._shard, self._follower = host, host.shard, follower
        host.follower = follower

    async def run(self, site: str, address: str) -> None:
        """Run until cancelled. `address`: the address at which the learners of its site reach it."""
        self._follower.request = replace(self._follower.request, site=site, address=address)
        await self._follower.run(self)

    def joined(self, answer: JoinAnswer) -> None:
        manifest = self._shard.manifest
        if manifest is None or manifest.digest != answer.manifest_digest:
            manifest = cut(answer.tensors, answer.num_fragments, answer.num_shards)
            if manifest.digest != answer.manifest_digest:
                raise ManifestMismatch("the shard cuts its model differently: install equal versions")
            self._follower.held.clear()
        self._shard.mirror(answer, replace(manifest, ties=answer.ties))

    def hear(self, directive: Directive) -> None:
        if isinstance(directive, Pulse) and self._shard.told is not None:
            self._shard.told = replace(self._shard.told, pulse=directive)
        if isinstance(directive, Pulse | Stop):
            self._host.readers.tell(directive)

    async def take(self, committed: Committed) -> None:
        """Pull an announced version: if possible as the change since the version that it has, otherwise as values."""
        host, state = self._host, self._shard.versions.owned(committed.fragment_id)
        assert self._follower.answer is not None
        encodings = pull_encodings(state.fragment.encoding(self._follower.answer.policy.pull_encoding))
        before = state.published
        want, have = (committed.epoch, committed.version), None if before is None else state.version_id
        if have == want:
            return
        request = PullRequest(committed.fragment_id, encodings, have, want)
        size = state.fragment.num_elements
        parts = self._follower.transport.pull(self._follower.caller, request, call_s(4 * size))
        header, payload = await read_version(parts, request, size)
        assert payload is not None, "it was not held"
        base = None if header.base_version is None else before
        try:
            rebuild = partial(_published, payload, encodings[-1], base, committed.near)
            published = await host.work.compute("encode", rebuild)
        except BadChecksum:
            state.published = None  # the next attempt asks for values
            raise
        record = replace(
            empty_record(committed.fragment_id), epoch=header.epoch, version=header.version,
            tokens_merged=header.tokens_merged,
        )  # fmt: skip
        self._shard.versions.mirrored(record, published)
        host.advance()


def _published(payload: Payload, encoding: str, before: Published | None, near: Near | None) -> Published:
    """Rebuild the version in the exact bytes that the shard sends. Raises BadChecksum; see `decode_version`."""
    base = None if before is None else decode_version(before.values, None)[0]
    anchor, _ = decode_version(payload, base)
    published = Published(encode_payload(anchor, encoding), None if before is None else payload)
    if near is None:
        return published
    named = published.named()
    assert named.sha256 is not None
    if named.sha256[0] != near.values_sha256:
        raise BadChecksum("the bytes are not those that were announced")
    return named


T = TypeVar("T")


async def tell_replaced(host: ShardHost, transport: Transport, caller: Identity) -> Superseded:
    """Tell the replaced shard that it is replaced, until it has heard this, or says that this shard is replaced."""
    request = FollowRequest(Role.STANDBY, epoch=host.shard.epoch, tokens_merged=host.shard.tokens_merged)
    while True:
        try:
            async with asyncio.timeout(LONGEST_S):
                answer = await transport.follow(caller, request).hear()
            if isinstance(answer, Evicted):
                return host.end_as_replaced(answer.message)
        except Superseded as told:
            host.log.error("the replaced shard has ended", why=told, code=told.code)
            return told
        except (Refusal, Unavailable, TimeoutError):
            pass
        await asyncio.sleep(LONGEST_S)


class Standby:
    """Copies the files of one shard. Owned by one event loop."""

    def __init__(self, follower: Follower, folder: StandbyFolder, origin: Origin, disk: Executor, log: Log) -> None:
        """`origin`: from the settings. It must equal the shard's, or the shard could not continue from these files."""
        self.follower = follower
        self.num_fragments = 0
        self.bytes_saved = 0
        self._folder, self._origin, self._disk, self._log = folder, origin, disk, log
        self._epoch = 0

    async def run(self) -> None:
        """Run until the folder is promoted. Raises OSError."""
        self.follower.held |= await self._do(self._folder.newest)
        following = asyncio.create_task(self.follower.run(self), name="following")
        try:
            while not await self._do(self._folder.look):  # noqa: ASYNC110 - a folder sends no event
                await asyncio.sleep(AGAIN_S)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def ready(self) -> tuple[bool, str]:
        """Whether it can be promoted, and if not, why."""
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
        """Ignore all other directives."""

    async def take(self, committed: Committed) -> None:
        """Copy the file of an announced version. Raises VersionDamaged, WrongFolder."""
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
                        raise BadRequest("the shard sent more bytes than it announced")
                    if said_crc32c(part) not in (None, crc32c(part)):
                        raise BadChecksum(f"version {version} of fragment {fragment_id} changed on the way")
                    await self._do(partial(file.write, memoryview(part)))
                    left -= len(part)
                if left:
                    raise VersionGone(f"version {version} of fragment {fragment_id} stopped before all bytes arrived")
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
