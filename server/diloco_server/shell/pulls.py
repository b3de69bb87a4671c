"""Answers Pull: finds a version or its file, encodes or cuts it if needed, and sends its bytes to callers that read.

It tells the core only which versions learners have, and how long their pulls took.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import replace
from functools import partial

from diloco_common.codec import Chunk, Payload, PayloadHeader, encode_payload
from diloco_common.codec.change import decode_version
from diloco_common.codec.frames import NewFrame
from diloco_common.codec.parts import ITEM_BYTES, cut_chunks, cut_header, num_elements
from diloco_common.errors import BadRequest, NoAverage, Refusal, UnknownEncoding, VersionGone
from diloco_common.trust.identity import Identity
from diloco_common.wire.calls import CALL_S, SETTLE_S, SLOWEST_BYTES_PER_S
from diloco_common.wire.messages import (
    AVERAGE,
    FILE,
    FILE_CHUNK,
    TRANSFERS_AT_ONCE,
    Committed,
    Directive,
    Near,
    PullHeader,
    PullRequest,
    Range,
    VersionId,
)
from diloco_server.shell.host import ShardHost
from diloco_server.shell.quotas import SHOWN_BYTES, Places, Ranks, Takers
from diloco_server.shell.waits import Outgoing, Unread
from diloco_server.storage.filesystem import OldFile

PULL_S = 900.0
"""Maximum length of a pull in seconds, in addition to the time for its bytes on a slow link. A pull ends by its
deadline, because gRPC cannot drop bytes that a caller does not take."""
SMALL_CHUNK_BYTES = 64 << 10
"""Chunk size for callers that are not known to read, since the transport copies a chunk that is not read."""
UNTRUSTED_PAUSE_S = 5.0
"""Seconds that such a caller may pause. Meanwhile it keeps a version, perhaps an outdated one, in memory."""
OBSERVER_ENCODINGS = ("float32", AVERAGE)
"""Encodings that Pull accepts besides the run's own; the shard makes them for the caller alone."""
MAY_COME_S = CALL_S - SETTLE_S
"""How long a mirror waits for a requested version that it does not have yet."""


class Pulls:
    def __init__(self, host: ShardHost) -> None:
        self._host, self._shard, self._versions = host, host.shard, host.shard.versions
        self._of_learners, self._of_hosts = Places[object](TRANSFERS_AT_ONCE), Places[object](TRANSFERS_AT_ONCE)
        self._of_ranks = Ranks("pulls", max(TRANSFERS_AT_ONCE, host.settings.shard.max_pushes // 2))
        self._takers = Takers()
        self._outgoing = Outgoing(bytes_most=256 << 20)
        self._own_encodings = Places[object](
            each=2, together=4, crowded="pulls in an encoding of their own are open; try again soon"
        )

    def answer(
        self, caller: Identity, request: PullRequest, ends_in_s: float
    ) -> AsyncGenerator[PullHeader | Chunk, None]:
        """A version, or the file of one. `ends_in_s`: seconds until the caller's deadline."""
        is_file = FILE in request.encodings
        return self._file(caller, request) if is_file else self._version(caller, request, ends_in_s)

    async def _version(
        self, caller: Identity, request: PullRequest, ends_in_s: float
    ) -> AsyncGenerator[PullHeader | Chunk, None]:
        with self._place(caller) as account, self._takers.pulling(account) as pulled:
            await self._may_come(request)
            header, change, values = self._found(caller, request)
            ranges = request.ranges
            if ranges:
                _check_ranges(ranges, values.header.num_elements)
                header = replace(header, ranges=ranges)
            size = num_elements(ranges) if ranges else values.header.num_elements
            _check_ends(ends_in_s, 4 * size)
            if ranges or (change is not None and not pulled.is_trusted and _is_large(change.header)):
                change = None  # ranges may share the change's scales, so it cannot be cut
            made = {payload.header.encoding: payload for payload in (change, values) if payload is not None}
            only_made = bool(ranges or request.want)  # other encodings: only for the whole latest version
            encoding = _choose_encoding(request.encodings, made, () if only_made else OBSERVER_ENCODINGS)
            payload = made.get(encoding)
            if request.have == (header.epoch, header.version):
                yield header
            elif payload is not None:
                base = request.have if payload is change else None
                header = replace(header, payload=payload.header, base_version=base and base[1])
                chunks: Iterable[Chunk] = payload.chunks
                small = None if pulled.is_trusted else _small_chunk_elements(payload.header)
                if small is not None and not ranges:
                    ranges = (Range(0, size),)
                if ranges:
                    cut = partial(cut_header, payload, ranges, small)
                    header = replace(header, payload=await self._host.work.compute("encode", cut))
                    chunks = cut_chunks(payload, ranges, small)
                unread = Unread(chunks, self._host.settings.lease.lease_s if pulled.is_trusted else UNTRUSTED_PAUSE_S)
                del change, values, made, payload, chunks  # so that `unread` alone holds the version
                async with aclosing(self._parts(header, unread)) as parts:
                    async for part in parts:
                        yield part
                pulled.num_bytes = header.payload.num_bytes if header.payload is not None else 0
                if caller.generation and (request.have or request.want):
                    self._pulled(caller, header)
            else:
                whose = f"pulls of {caller.account or 'this host'} in an encoding of their own"
                with self._own_encodings.held(caller.account, whose):
                    header, payload = await self._encoded(caller, request.fragment_id, encoding)
                    header = replace(header, payload=payload.header)
                    unread = Unread(payload.chunks, self._host.settings.lease.lease_s)
                    async with aclosing(self._parts(header, unread)) as parts:
                        async for part in parts:
                            yield part

    async def _file(self, caller: Identity, request: PullRequest) -> AsyncGenerator[PullHeader | Chunk, None]:
        """Send a version file to a standby, read from disk in chunks. The standby calls again once it has the file."""
        caller.check_may("Standby")
        if request.want is None or request.ranges:
            raise BadRequest(f"a Pull of {FILE} must name the version that it wants, and no ranges")
        with self._place(caller):
            header, file = await self._open_file(request.fragment_id, VersionId(*request.want))
            with closing(file):
                if request.have == request.want:
                    self._host.work.copied(header.fragment_id, header.version)
                    yield replace(header, payload=None)
                    return
                yield header
                for start in range(0, file.size, FILE_CHUNK):
                    num_bytes = min(FILE_CHUNK, file.size - start)
                    async with self._outgoing.held(num_bytes):
                        yield await self._host.keeper.read(partial(_framed, file, start, num_bytes))

    async def _parts(self, header: PullHeader, unread: Unread[Chunk]) -> AsyncGenerator[PullHeader | Chunk, None]:
        assert header.payload is not None
        yield header
        with closing(unread):
            for num_bytes in chunk_sizes(header.payload):
                async with self._outgoing.held(num_bytes):  # before a chunk is cut
                    yield unread.next(num_bytes)
                    unread.taken()
                self._host.telemetry.bytes_pulled += num_bytes

    @contextmanager
    def _place(self, caller: Identity) -> Iterator[str]:
        """Hold this while a pull is open; it gives the account. Raises Busy and what `ShardHost.member` raises."""
        if not caller.generation:
            with self._of_hosts.held(caller.account, f"pulls of {caller.account or 'this host'}"):
                yield caller.account
            return
        with (
            self._of_ranks.account(self._host.member(caller).learner_id, caller.rank) as account,
            self._of_learners.held(account, f"pulls of {account}"),
        ):
            yield account

    # ------------------------------------------------------------ what is sent

    def _found(self, caller: Identity, request: PullRequest) -> tuple[PullHeader, Payload | None, Payload]:
        """The header of a version, the change since the caller's version (if there is one), and the values.

        Raises UnknownFragment, NotSeeded, VersionGone, and what `member` raises if the caller names a lease.
        """
        if caller.generation:
            self._host.member(caller)
        if request.want is not None:
            holder = caller.learner_id if caller.generation else ""
            record, published = self._shard.named(request.fragment_id, VersionId(*request.want), holder)
            if record is not self._versions.owned(request.fragment_id).record:
                return (
                    self._shard.pull_header(caller.learner_id, request.fragment_id, record),
                    None,
                    published.values,
                )
        _, values = self._shard.published(request.fragment_id)
        have = None if request.have is None else VersionId(*request.have)
        change = self._shard.change_since(request.fragment_id, have)
        return self._shard.pull_header(caller.learner_id, request.fragment_id), change, values

    async def _may_come(self, request: PullRequest) -> None:
        """In a mirror: wait for a version that its shard may have just announced."""
        if (follower := self._host.follower) is None or request.want is None:
            return
        state, want = self._versions.owned(request.fragment_id), VersionId(*request.want)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAY_COME_S):
                await self._host.work.until(
                    lambda: (
                        not follower.is_up
                        or state.epoch > want.epoch
                        or (state.published is not None and state.version_id >= want)
                    )
                )

    def _pulled(self, caller: Identity, header: PullHeader) -> None:
        """A learner that had an earlier version has pulled this one completely."""
        with contextlib.suppress(Refusal):
            self._shard.rounds.pulled(self._host.member(caller), header.fragment_id, header.version, self._host.clock())

    async def _open_file(self, fragment_id: int, want: VersionId) -> tuple[PullHeader, OldFile]:
        """Open the file of a version, and make its header. Raises UnknownFragment and VersionGone."""
        state, file = self._versions.owned(fragment_id), None
        if want.epoch in (self._shard.epoch, state.epoch):
            with contextlib.suppress(OSError):
                file = await self._host.keeper.read(partial(self._host.store.open, fragment_id, want.version))
        if file is None:
            raise VersionGone(
                f"fragment {fragment_id}: version {want.version} of epoch {want.epoch} is not on the disk of this "
                "shard; take the next announced version"
            )
        payload = PayloadHeader(FILE, file.size, FILE_CHUNK, file.size, 0)
        return PullHeader(fragment_id, want.version, want.epoch, 0, 0, state.tokens_merged, payload), file

    async def _encoded(self, caller: Identity, fragment_id: int, encoding: str) -> tuple[PullHeader, Payload]:
        """The latest version, or the average, in another encoding for one caller. Raises Draining, and NoAverage."""
        if encoding == AVERAGE and not self._host.driver.rules_of(self._versions.owned(fragment_id).fragment).average:
            raise NoAverage(
                "the run keeps no average of its versions: set outer.average on all shards (0.97, for example), and "
                "start them again"
            )
        await self._host.work.until(lambda: self._host.work.closed or not self._versions.owned(fragment_id).computing)
        header = self._shard.pull_header(caller.learner_id, fragment_id)  # describes the values that are read next
        return header, await self._encode(fragment_id, encoding)

    async def _encode(self, fragment_id: int, encoding: str) -> Payload:
        """Encode the current values. Later changes wait behind this on the compute thread. Raises Draining."""
        values = self._versions.owned(fragment_id).values
        if values is None:  # a mirror has only the encoded version
            published = self._shard.published(fragment_id)[1]
            return await self._host.work.compute(
                "encode", lambda: encode_payload(decode_version(published, None)[0], encoding)
            )
        if encoding == AVERAGE:
            return await self._host.work.compute("encode", lambda: encode_payload(values.averaged(), "float32"))
        return await self._host.work.compute("encode", lambda: encode_payload(values.theta, encoding))

    def near(self, directive: Directive, learner_id: str, address: str) -> Directive:
        """The announcement, with the mirror's address and the hashes of the bytes, if the version was hashed."""
        if not isinstance(directive, Committed):
            return directive
        state = self._versions.owned(directive.fragment_id)
        names = None if state.published is None else state.published.sha256
        if names is None or state.version_id != (directive.epoch, directive.version):
            return directive  # a mirror joined later, or there is a newer version
        return replace(
            directive, near=Near(address, *names, self._shard.pull_header(learner_id, directive.fragment_id))
        )


def _framed(file: OldFile, start: int, num_bytes: int) -> Chunk:
    """Read bytes of a file into a frame. Raises OSError."""
    frame = NewFrame(num_bytes)
    if file.read_into(frame.chunk.numpy().data, start) != num_bytes:
        raise OSError("the file became shorter")
    return frame.sealed()[0]


def _check_ends(ends_in_s: float, num_bytes: int) -> None:
    """Refuse a pull without an acceptable deadline: its bytes are held until it ends. Raises BadRequest."""
    longest_s = PULL_S + num_bytes / SLOWEST_BYTES_PER_S
    if ends_in_s > longest_s:
        raise BadRequest(
            f"a pull of this fragment must have a deadline of at most {longest_s:.0f} s; give it a timeout"
        )


def _check_ranges(ranges: Sequence[Range], fragment_elements: int) -> None:
    """Check that the ranges lie within the fragment. Raises BadRequest."""
    if ranges[-1].stop > fragment_elements:
        raise BadRequest(f"a range ends at element {ranges[-1].stop} of {fragment_elements}")


def _is_large(header: PayloadHeader) -> bool:
    return header.chunk_bytes(0) > SHOWN_BYTES


def _small_chunk_elements(header: PayloadHeader) -> int | None:
    """Chunk length for a caller that is not known to read; None: chunks are already small, or cannot be cut."""
    item = ITEM_BYTES.get(header.encoding)
    return SMALL_CHUNK_BYTES // item if item and _is_large(header) else None


def _choose_encoding(wanted: Sequence[str], made: Iterable[str], more: Sequence[str]) -> str:
    """The encoding to send: the caller's first choice among those available. Raises UnknownEncoding."""
    offered = tuple(dict.fromkeys((*made, *more)))
    for encoding in wanted or offered[:1]:
        if encoding in offered:
            return encoding
    raise UnknownEncoding(f"versions are sent as {' or '.join(offered)}, not as {', '.join(wanted)[:100]}")


def chunk_sizes(header: PayloadHeader) -> Iterator[int]:
    return (header.chunk_bytes(index) for index in range(header.num_chunks))
