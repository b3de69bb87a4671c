"""Answers pulls, and adds a mirror's address to announcements.

Changes nothing in the shard, except which versions learners are known to have.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from diloco_common.codec import Payload, PayloadHeader, encode_payload
from diloco_common.codec.change import decode_version
from diloco_common.codec.parts import cut_header
from diloco_common.errors import NoAverage, Refusal, VersionGone
from diloco_common.trust.identity import Identity
from diloco_common.wire.messages import (
    AVERAGE,
    FILE,
    FILE_CHUNK,
    Committed,
    Directive,
    Near,
    PullHeader,
    PullRequest,
    Range,
    VersionId,
)
from diloco_server.shell.host import ShardHost
from diloco_server.storage.filesystem import OldFile

MAY_COME_S = 10.0
"""How long a mirror waits for a requested version that it does not have yet."""


class Pulls:
    def __init__(self, host: ShardHost) -> None:
        self._host, self._shard = host, host.shard

    def answer(self, caller: Identity, request: PullRequest) -> tuple[PullHeader, Payload | None, Payload]:
        """The header of a version, the change since the caller's version (if there is one), and the values.

        Raises UnknownFragment, NotSeeded, VersionGone, and as `member` does if the caller names a lease.
        """
        if caller.generation:
            self._host.member(caller)
        if request.want is not None:
            holder = caller.learner_id if caller.generation else ""
            record, published = self._shard.named(request.fragment_id, VersionId(*request.want), holder)
            if record is not self._shard.owned(request.fragment_id).record:
                return (
                    self._shard.pull_header(caller.learner_id, request.fragment_id, record),
                    None,
                    published.values,
                )
        _, values = self._shard.published(request.fragment_id)
        have = None if request.have is None else VersionId(*request.have)
        change = self._shard.change_since(request.fragment_id, have)
        return self._shard.pull_header(caller.learner_id, request.fragment_id), change, values

    async def may_come(self, request: PullRequest) -> None:
        """In a mirror: wait for a version that its shard may just have announced."""
        if (follower := self._host.follower) is None or request.want is None:
            return
        state, want = self._shard.owned(request.fragment_id), VersionId(*request.want)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAY_COME_S):
                await self._host.until(
                    lambda: (
                        not follower.is_up
                        or state.epoch > want.epoch
                        or (state.published is not None and state.version_id >= want)
                    )
                )

    def pulled(self, caller: Identity, header: PullHeader) -> None:
        """A learner that had an earlier version has pulled this one in full."""
        with contextlib.suppress(Refusal):
            self._shard.pulled(self._host.member(caller), header.fragment_id, header.version, self._host.clock())

    async def open_file(self, fragment_id: int, want: VersionId) -> tuple[PullHeader, OldFile]:
        """Open the file of a version, and make its header. Raises UnknownFragment and VersionGone."""
        state, file = self._shard.owned(fragment_id), None
        if want.epoch in (self._shard.epoch, state.epoch):
            with contextlib.suppress(OSError):
                file = await self._host.keeper.read(partial(self._host.store.open, fragment_id, want.version))
        if file is None:
            raise VersionGone(
                f"fragment {fragment_id}: version {want.version} of epoch {want.epoch} is not on the disk of this "
                "shard; take what is announced next"
            )
        payload = PayloadHeader(FILE, file.size, FILE_CHUNK, file.size, 0)
        return PullHeader(fragment_id, want.version, want.epoch, 0, 0, state.tokens_merged, payload), file

    async def cut_header(
        self, values: Payload, ranges: Sequence[Range], chunk_elements: int | None = None
    ) -> PayloadHeader:
        """The header for these ranges. Reads one chunk at a time. Raises Draining once the shard has ended."""
        return await self._host.compute("encode", lambda: cut_header(values, ranges, chunk_elements))

    async def encode_for(self, caller: Identity, fragment_id: int, encoding: str) -> tuple[PullHeader, Payload]:
        """The latest version, or the average, in another encoding for one caller. Raises Draining, and NoAverage."""
        if encoding == AVERAGE and not self._host.driver.making(self._shard.owned(fragment_id).fragment).average:
            raise NoAverage(
                "the run keeps no average of its versions: set outer.average on all shards (0.97, for example), and "
                "start them again"
            )
        await self._host.until(lambda: self._host.closed or not self._shard.owned(fragment_id).computing)
        header = self._shard.pull_header(caller.learner_id, fragment_id)  # describes the values that are read next
        return header, await self._encode(fragment_id, encoding)

    async def _encode(self, fragment_id: int, encoding: str) -> Payload:
        """Encode the current values; later changes come later on the compute thread. Raises Draining."""
        values = self._shard.owned(fragment_id).values
        if values is None:  # a mirror has only the encoded version
            published = self._shard.published(fragment_id)[1]
            return await self._host.compute(
                "encode", lambda: encode_payload(decode_version(published, None)[0], encoding)
            )
        if encoding == AVERAGE:
            return await self._host.compute("encode", lambda: encode_payload(values.averaged(), "float32"))
        return await self._host.compute("encode", lambda: encode_payload(values.theta, encoding))

    def near(self, directive: Directive, learner_id: str, address: str) -> Directive:
        """The announcement, with the mirror's address and the hashes of the bytes, if the version was hashed."""
        if not isinstance(directive, Committed):
            return directive
        state = self._shard.owned(directive.fragment_id)
        names = None if state.published is None else state.published.sha256
        if names is None or state.version_id != (directive.epoch, directive.version):
            return directive  # a mirror joined later, or a newer version is out
        return replace(
            directive, near=Near(address, *names, self._shard.pull_header(learner_id, directive.fragment_id))
        )
