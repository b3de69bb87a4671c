"""Answers a shard's calls as plain values: checks callers, limits them, and receives bytes.

Transports deliver calls (`servicer.py` for gRPC). Only the host changes the shard's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from diloco_common.codec import Chunk, Payload, PayloadReceiver
from diloco_common.errors import (
    BadRequest,
    Busy,
    Draining,
    ProtocolMismatch,
    Refusal,
    TornUpload,
)
from diloco_common.trust.identity import Identity
from diloco_common.wire.calls import REPORT_EVERY_S
from diloco_common.wire.messages import (
    PROTOCOL,
    TRANSFERS_AT_ONCE,
    Directive,
    Evicted,
    FollowRequest,
    JoinAnswer,
    JoinRequest,
    Progress,
    PullHeader,
    PullRequest,
    PushAnswer,
    PushHeader,
    Role,
)
from diloco_server.shell.host import ShardHost
from diloco_server.shell.pulls import Pulls, chunk_sizes
from diloco_server.shell.quotas import OpenPushes, Places, Ranks, Rate
from diloco_server.shell.rules import check_codecs
from diloco_server.shell.streams import LearnerStream
from diloco_server.shell.waits import BODY_S, Bodies, Deadlines, OpenPush, Turns, Wait

HOST_LEARNERS = 512
"""Maximum number of leases of one host without certificates, or half of `shard.max_learners` if that is more."""

REPORTS_PER_S = 2 / REPORT_EVERY_S
"""Reports per second on one control stream: twice as many as a learner sends. A second's worth may come at once.
Further reports wait, and none is lost."""

SEEDS_AT_ONCE = 4
"""Maximum number of seeds of different fragments received at once. Learners that start together all send the whole
model in float32, which would take many times the shard's memory."""

T = TypeVar("T")


class Service:
    """Answers the calls of one shard: a `ports.ShardService`."""

    def __init__(self, host: ShardHost) -> None:
        limits = host.settings.shard
        self._host, self._pulls = host, Pulls(host)
        self._pushes = OpenPushes[OpenPush](TRANSFERS_AT_ONCE, limits.max_pushes, bytes_most=4 << 30)
        self._rank_pushes = Ranks("pushes", max(TRANSFERS_AT_ONCE, limits.max_pushes // 2))
        self._seeding: dict[tuple[int, int], OpenPush] = {}  # (fragment, part) of the seeds being received
        self._messages, self._bodies = Places[Wait](each=4), Bodies()
        # Hundreds of a host's leases may end together.
        self._joins = Rate("joins from this host, or of this identity", burst=1024, per_s=100.0)
        self._homes: dict[str, str] = {}  # learner id -> the host it joined from
        self._proven: dict[str, Identity] = {}  # learner id -> the identity that last used its lease

    async def read(self, caller: Identity, message: Callable[[], Awaitable[T]]) -> T:
        """Read the only message of a call. Few are read at once, since their size is not known yet. Raises Busy."""
        late = Busy(f"the message did not arrive within {BODY_S:g} s; try again")
        account = self._account(caller)
        if account is None:
            async with self._bodies.place() as wait:
                return await wait.until(now() + BODY_S, late, message)
        wait = Wait()
        oldest = self._messages.take(account, wait)
        if oldest is not None:
            oldest.end(Busy("later calls of this learner came first"))
        try:
            return await wait.until(now() + BODY_S, late, message)
        finally:
            self._messages.give_back(account, wait)

    def _account(self, caller: Identity) -> str | None:
        """The learner to charge for a call; None: the caller holds no lease."""
        with suppress(Refusal):
            return self._host.member(caller).learner_id
        return None

    # ------------------------------------------------------------ leases

    async def join(self, caller: Identity, request: JoinRequest) -> JoinAnswer:
        self._joins.take(caller.account, now())
        if request.protocol != PROTOCOL:
            raise ProtocolMismatch(
                f"this shard speaks protocol {PROTOCOL}, the caller {request.protocol}; install equal versions"
            )
        if request.observe:
            return self._host.observe(request.tensors)
        if not caller.learner_id:
            raise BadRequest("metadata diloco-learner is missing")
        check_codecs(self._host.settings.sync, self._host.driver.rules.sources, request.decodes)
        self._check_home(caller)
        answer = self._host.join(caller, request)
        self._homes[caller.learner_id] = caller.account
        self._hold(replace(caller, generation=answer.generation))
        return answer

    def _hold(self, caller: Identity) -> None:
        """Remember the proven holder of a lease, and forget holders whose leases have ended."""
        if caller.proof is None:
            return
        self._proven[caller.learner_id] = caller
        live = {m.learner_id: m.generation for m in self._host.shard.membership.live()}
        self._proven = {name: held for name, held in self._proven.items() if live.get(name) == held.generation}

    def leases_of(self, serials: AbstractSet[str]) -> list[Identity]:
        """Holders of leases, with or without an open call, whose certificate has one of these serials."""
        return [held for held in self._proven.values() if held.proof is not None and held.proof.serial in serials]

    def _check_home(self, caller: Identity) -> None:
        """Keep leases free for learners of other hosts, if nobody proves an identity. Raises Busy."""
        if not caller.peer or caller.proof is not None:
            return
        membership = self._host.shard.membership
        most = max(HOST_LEARNERS, self._host.settings.shard.max_learners // 2)
        self._homes = {m.learner_id: self._homes.get(m.learner_id, "") for m in membership.live()}
        neighbours = sum(home == caller.account and name != caller.learner_id for name, home in self._homes.items())
        if neighbours >= most:
            raise Busy(
                f"{most} learners from {caller.account} hold a lease already "
                f"(half of shard.max_learners, but at least {HOST_LEARNERS}); try again later"
            )

    async def attend(self, caller: Identity, reports: AsyncIterator[Progress]) -> AsyncGenerator[Directive, None]:
        stream, site = self._host.attend(caller), self._host.member(caller).site
        self._hold(caller)  # it may have another certificate by now
        reader = asyncio.create_task(self._read_reports(caller, reports, stream), name="attend")
        try:
            while (directive := await stream.next()) is not None:
                mirror = self._host.readers.mirror_at(site)
                yield self._pulls.near(directive, caller.learner_id, mirror) if mirror else directive
                if isinstance(directive, Evicted):
                    break
            if reader.done():
                reader.result()  # raises what ended it
        finally:
            reader.cancel()
            self._host.close_stream(stream)

    async def leave(self, caller: Identity) -> None:
        self._host.leave(caller)

    async def follow(self, caller: Identity, request: FollowRequest) -> AsyncGenerator[Directive, None]:
        if request.epoch:
            caller.check_may("Standby")
            yield await self._host.supersede(request)
            return
        if request.role == Role.STANDBY and not self._host.keeps_files:
            raise BadRequest("this shard keeps its versions only in memory; start it with shard.data_dir")
        with self._host.readers.opened(caller, request, self._host.clock) as reader:
            self._host.follow(reader)
            while (directive := await reader.stream.next()) is not None:
                yield self._pulls.near(directive, "", "") if reader.role is Role.MIRROR else directive

    async def _read_reports(self, caller: Identity, reports: AsyncIterator[Progress], stream: LearnerStream) -> None:
        """Pass on the learner's reports until its side ends, then end ours. Raises BadRequest."""
        try:
            turns = Turns(REPORTS_PER_S, round(REPORTS_PER_S))
            async for progress in reports:
                self._host.progress(caller, progress)
                await turns.next()  # meanwhile the transport holds the sender back
        except BadRequest:
            raise
        except Refusal as refusal:
            stream.send(Evicted(refusal.code, str(refusal)))
        finally:
            stream.end()

    # ------------------------------------------------------------ contributions

    async def push(self, caller: Identity, parts: AsyncIterator[PushHeader | Chunk]) -> PushAnswer:
        member = self._host.member(caller)
        with self._push_place(member.learner_id, caller.rank) as push:
            header = await push.next(parts, now() + self._host.settings.lease.lease_s)
            if not isinstance(header, PushHeader):
                raise BadRequest("a push begins with its header")
            answer = self._host.admit(member, header)
            if answer is not None:
                return answer
            self._announce(push, header)
            with self._seed_place(push, header):
                try:
                    payload, norms = await self._receive(push, header, parts)
                except (TornUpload, Draining):
                    raise
                except Refusal as refusal:
                    return self._host.reject(member, header, refusal)
                return self._host.contribute(caller, header, payload, norms)

    async def _receive(
        self, push: OpenPush, header: PushHeader, parts: AsyncIterator[PushHeader | Chunk]
    ) -> tuple[Payload, tuple[float, ...]]:
        """Receive the bytes of an admitted push, and the norms of its pieces.

        Raises TornUpload if they are slower than `SLOWEST_BYTES_PER_S` per push, plus a lease's time for pauses.
        """
        receiver, norms = PayloadReceiver(header.payload), self._host.norms_of(header)
        deadlines, sizes = Deadlines(self._host.settings.lease.lease_s, TRANSFERS_AT_ONCE), chunk_sizes(header.payload)
        while (part := await push.next(parts, deadlines.due(next(sizes, 0)))) is not None:
            if isinstance(part, PushHeader):
                raise BadRequest("after its header, a push has chunks only")
            receiver.add(part)
            self._host.inspect(norms, part)
            self._host.telemetry.bytes_pushed += len(part)
        if not receiver.is_complete:  # the connection broke; the round still waits
            raise TornUpload(f"fragment {header.fragment_id}: the bytes stopped before all arrived; push again")
        return receiver.finish(), norms.finish()

    @contextmanager
    def _push_place(self, learner_id: str, rank: int) -> Iterator[OpenPush]:
        """Hold this while a push is open. Raises Busy."""
        with self._rank_pushes.account(learner_id, rank) as account:
            push = OpenPush(account, learner_id)
            try:
                oldest = self._pushes.opened(account, push)
                if oldest is not None:
                    oldest.end(TornUpload(f"{TRANSFERS_AT_ONCE} later pushes of this learner are open; push again"))
                yield push
            finally:
                self._pushes.closed(account, push)

    def _announce(self, push: OpenPush, header: PushHeader) -> None:
        """Accept a push's bytes, and end an older push of its fragment that a broken connection left. Raises Busy."""
        older = self._pushes.announced(push.account, push, header.fragment_id, header.payload.num_bytes)
        if older is not None:
            older.end(TornUpload(f"fragment {header.fragment_id}: a later push of this learner came; push again"))

    @contextmanager
    def _seed_place(self, push: OpenPush, header: PushHeader) -> Iterator[None]:
        """Hold this while a seed's bytes arrive. Does nothing for a contribution. Raises Busy."""
        if not header.is_seed:
            yield
            return
        seeding, key = self._seeding, (header.fragment_id, header.part)
        others = [p for (f, _), p in seeding.items() if f == header.fragment_id and p.learner_id != push.learner_id]
        if others or (key not in seeding and len(seeding) >= SEEDS_AT_ONCE):
            raise Busy(f"others are sending {len(seeding)} fragments; try again in a moment")
        seeding[key] = push
        try:
            yield
        finally:
            if seeding.get(key) is push:  # a later one of the same learner takes its place
                del seeding[key]

    # ------------------------------------------------------------ versions

    def pull(
        self, caller: Identity, request: PullRequest, ends_in_s: float = 0.0
    ) -> AsyncGenerator[PullHeader | Chunk, None]:
        return self._pulls.answer(caller, request, ends_in_s)


def now() -> float:
    return asyncio.get_running_loop().time()
