"""What a shard answers to its callers, as plain values: who may call, how much at once, and how bytes are taken in.

Transports bring the calls (`servicer.py` is gRPC). The host decides and changes state; nothing here touches the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from diloco_common.codec import Payload, PayloadReceiver
from diloco_common.codec.change import pull_encodings
from diloco_common.errors import BadRequest, Busy, Draining, ProtocolMismatch, Refusal, TornUpload, UnknownEncoding
from diloco_common.identity import Identity
from diloco_common.messages import (
    Directive,
    Evicted,
    JoinAnswer,
    JoinRequest,
    Progress,
    PullHeader,
    PullRequest,
    PushAnswer,
    PushHeader,
)
from diloco_common.protocol import PROTOCOL, PUSHES_AT_ONCE, SLOWEST_BYTES_PER_S
from diloco_server.control_streams import ControlStream
from diloco_server.host import ShardHost

OBSERVERS_AT_ONCE = 4
"""Pulls that may be open at once in an encoding made for their caller alone; more are answered BUSY."""
OBSERVER_ENCODINGS = ("float32",)
"""Taken by Pull besides the run's own: encoded for the caller alone."""

PROCESS_ID_MAX = 64
"""Characters of what tells a process from others of its learner id: it is kept, and written into every version."""

SEEDS_AT_ONCE = 4
"""Seeds received at once, of different fragments. Learners that start together all bring the whole model in float32:
taken all at once, that is many times the memory that the shard needs for it."""


class Service:
    """Answers the calls of one shard: a `ports.ShardService`."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._pushes = 0  # open now
        self._observers = 0  # pulls open now whose bytes are made for them alone
        self._seeding: set[int] = set()  # fragments whose seed is coming in

    # ------------------------------------------------------------ leases

    async def join(self, caller: Identity, request: JoinRequest) -> JoinAnswer:
        if request.protocol != PROTOCOL:
            raise ProtocolMismatch(
                f"this shard speaks protocol {PROTOCOL}, the caller {request.protocol}; install equal versions"
            )
        if request.observe:
            return self._host.observe(request.tensors)
        if len(request.process_id) > PROCESS_ID_MAX:
            raise BadRequest(f"process_id has {len(request.process_id)} characters, at most {PROCESS_ID_MAX} are taken")
        if not caller.learner_id:
            raise BadRequest("metadata diloco-learner is missing")
        self._check_decodes(request.decodes)
        return self._host.join(caller.learner_id, request)

    async def attend(self, caller: Identity, reports: AsyncIterator[Progress]) -> AsyncGenerator[Directive, None]:
        stream = self._host.attend(caller)
        reader = asyncio.create_task(self._read_reports(caller, reports, stream), name="attend")
        try:
            while (directive := await stream.next()) is not None:
                yield directive
                if isinstance(directive, Evicted):
                    break
            if reader.done():
                reader.result()  # raises what ended it, such as bytes that are no message
        finally:
            reader.cancel()
            self._host.close_stream(stream)

    async def leave(self, caller: Identity) -> None:
        self._host.leave(caller)

    async def _read_reports(self, caller: Identity, reports: AsyncIterator[Progress], stream: ControlStream) -> None:
        """Hand in the learner's reports until its side ends; then end ours."""
        try:
            async for progress in reports:
                self._host.progress(caller, progress)
        except Refusal as refusal:
            stream.send(Evicted(refusal.code, str(refusal)))
        finally:
            stream.end()

    def _check_decodes(self, decodes: Sequence[str]) -> None:
        needed = pull_encodings(self._host.settings.sync.pull)
        if not set(needed) <= set(decodes):
            raise UnknownEncoding(
                f"versions are sent as {' and '.join(needed)} (sync.pull), "
                f"the learner decodes {', '.join(decodes) or 'nothing'}"
            )

    # ------------------------------------------------------------ contributions

    async def push(self, caller: Identity, parts: AsyncIterator[PushHeader | bytes]) -> PushAnswer:
        member = self._host.member(caller)
        with self._push_place():
            header = await self._next_part(parts)
            if not isinstance(header, PushHeader):
                raise BadRequest("a push begins with its header")
            answer = self._host.admit(member, header)
            if answer is not None:
                return answer
            with self._seed_place(header):
                try:
                    payload, norms = await self._receive(header, parts)
                except (TornUpload, Draining):
                    raise
                except Refusal as refusal:
                    return self._host.reject(member, header, refusal)
                return self._host.contribute(caller, header, payload, norms)

    async def _receive(
        self, header: PushHeader, parts: AsyncIterator[PushHeader | bytes]
    ) -> tuple[Payload, tuple[float, ...]]:
        """Take the bytes of a push that was admitted by its header, and the norms of its pieces."""
        receiver, norms = PayloadReceiver(header.payload), self._host.norms_of(header)
        while (part := await self._next_part(parts, header)) is not None:
            if isinstance(part, PushHeader):
                raise BadRequest("after its header a push has chunks only")
            receiver.add(part)
            self._host.inspect(norms, part)
            self._host.telemetry.received(len(part))
        if not receiver.is_complete:  # a connection broke, or the sender did: the round still waits for it
            raise TornUpload(f"fragment {header.fragment_id}: the bytes stopped before all were there; push again")
        return receiver.finish(), norms.finish()

    async def _next_part(
        self, parts: AsyncIterator[PushHeader | bytes], header: PushHeader | None = None
    ) -> PushHeader | bytes | None:
        """The next part; None at the end. Raises TornUpload after a pause longer than a lease and a slow chunk take."""
        wait_s = self._host.settings.lease.lease_s
        if header is not None:
            wait_s += PUSHES_AT_ONCE * header.payload.chunk_bytes(0) / SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(wait_s):
                return await anext(parts, None)
        except TimeoutError:
            raise TornUpload(f"no chunk came for {wait_s:.0f} s; push again") from None

    @contextmanager
    def _push_place(self) -> Iterator[None]:
        """Held while a push is open. Raises Busy."""
        limit = self._host.settings.shard.max_pushes
        if self._pushes >= limit:
            raise Busy(f"{limit} pushes are open (shard.max_pushes); try again in a moment")
        self._pushes += 1
        try:
            yield
        finally:
            self._pushes -= 1

    @contextmanager
    def _seed_place(self, header: PushHeader) -> Iterator[None]:
        """Held while the bytes of a seed come in; nothing for a contribution. Raises Busy."""
        if not header.is_seed:
            yield
            return
        if header.fragment_id in self._seeding or len(self._seeding) >= SEEDS_AT_ONCE:
            raise Busy(f"others are bringing {len(self._seeding)} fragments; try again in a moment")
        self._seeding.add(header.fragment_id)
        try:
            yield
        finally:
            self._seeding.remove(header.fragment_id)

    # ------------------------------------------------------------ versions

    async def pull(self, caller: Identity, request: PullRequest) -> AsyncGenerator[PullHeader | bytes, None]:
        header, change, values = self._host.pull(caller, request)
        made = {payload.header.encoding: payload for payload in (change, values) if payload is not None}
        encoding = _choose_encoding(request.encodings, made)
        payload = made.get(encoding)
        if request.have == (header.epoch, header.version):
            yield header
        elif payload is not None:
            base = request.have if payload is change else None
            for part in self._parts(header, payload, base and base[1]):
                yield part
        else:
            with self._observer_place():
                header, payload = await self._host.encode_for(caller, request.fragment_id, encoding)
                for part in self._parts(header, payload, None):
                    yield part

    def _parts(self, header: PullHeader, payload: Payload, base_version: int | None) -> Iterator[PullHeader | bytes]:
        yield replace(header, payload=payload.header, base_version=base_version)
        for chunk in payload.chunks:
            yield chunk
            self._host.telemetry.sent(len(chunk))

    @contextmanager
    def _observer_place(self) -> Iterator[None]:
        """Held while a pull is open whose bytes are made for its caller alone. Raises Busy."""
        if self._observers >= OBSERVERS_AT_ONCE:
            raise Busy(f"{OBSERVERS_AT_ONCE} pulls in an encoding of their own are open; try again soon")
        self._observers += 1
        try:
            yield
        finally:
            self._observers -= 1


def _choose_encoding(wanted: Sequence[str], made: Iterable[str]) -> str:
    """What a caller gets: the first that it takes of those that are made, best first, or can be made for it."""
    offered = tuple(dict.fromkeys((*made, *OBSERVER_ENCODINGS)))
    for encoding in wanted or offered[:1]:
        if encoding in offered:
            return encoding
    raise UnknownEncoding(f"versions are sent as {' or '.join(offered)}, not as {', '.join(wanted)[:100]}")
