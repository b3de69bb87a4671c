"""Directives on their way: one bounded stream for each learner and for each reader (observer, mirror or standby).

Owned by the shard's event loop. The core decides what to send; the transport reads the streams.

A later directive replaces a waiting one of its kind about the same fragment. So at most two directives per fragment,
and one of every other kind, wait for a learner that reads nothing. A slow reader skips to the newest version of each
fragment, and costs nothing else: it has no lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from diloco_common.errors import BadRequest
from diloco_common.ports import Clock
from diloco_common.trust.identity import Identity
from diloco_common.wire.messages import (
    Collect,
    Committed,
    Directive,
    Drain,
    Evicted,
    FollowRequest,
    Newest,
    Pulse,
    Role,
    Stop,
)
from diloco_server.core.effects import Tell
from diloco_server.shell.quotas import Places

STREAMS_EACH, STREAMS_MAX = 4, 64
"""Maximum number of open streams of one kind for callers without a lease: per account, and in all. The latter is also
the maximum number of readers that are remembered as away."""
CALLS = {Role.OBSERVER: "Follow", Role.MIRROR: "Mirror", Role.STANDBY: "Standby"}
"""The call that a scope must allow (`identity.MAY`) to follow in this role."""


class LearnerStream:
    def __init__(self, learner_id: str, generation: int) -> None:
        self.learner_id = learner_id
        self.generation = generation
        self._waiting: Newest[Directive] = Newest()
        self._is_over = False
        self._changed = asyncio.Event()

    def send(self, directive: Directive) -> None:
        """Queue a directive; it replaces an outdated one. No directive follows an eviction."""
        match directive:
            case Collect() | Committed():
                self._waiting.put(directive.fragment_id, type(directive), directive)
            case Evicted():
                if not self._is_over:
                    self._waiting.put(Evicted, Evicted, directive)
                self._is_over = True
            case _:
                self._waiting.put(type(directive), type(directive), directive)
        self._changed.set()

    def end(self) -> None:
        """Accept no more directives. Waiting ones are still sent: one may be the eviction."""
        self._is_over = True
        self._changed.set()

    async def next(self) -> Directive | None:
        """The next directive; None at the end."""
        while not self._waiting and not self._is_over:
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.take() if self._waiting else None


class ControlStreams:
    def __init__(self) -> None:
        self._by_learner: dict[str, LearnerStream] = {}

    def __len__(self) -> int:
        return len(self._by_learner)

    def __iter__(self) -> Iterator[LearnerStream]:
        return iter(self._by_learner.values())

    def open(self, learner_id: str, generation: int) -> LearnerStream:
        """Open a stream, and end an older one of the same learner."""
        self.end(learner_id)
        self._by_learner[learner_id] = stream = LearnerStream(learner_id, generation)
        return stream

    def close(self, stream: LearnerStream) -> None:
        if self._by_learner.get(stream.learner_id) is stream:
            del self._by_learner[stream.learner_id]

    def tell(self, tell: Tell) -> None:
        """Send a directive. If this generation has no stream, it is lost; a new stream starts with the full state."""
        stream = self._by_learner.get(tell.learner_id)
        if stream is not None and stream.generation == tell.generation:
            stream.send(tell.directive)

    def end(self, learner_id: str) -> None:
        stream = self._by_learner.get(learner_id)
        if stream is not None:
            stream.end()

    def end_all(self) -> None:
        for stream in self:
            stream.end()


@dataclass(eq=False)
class Reader:
    name: str
    role: Role
    site: str
    address: str
    since: float
    stream: LearnerStream = field(default_factory=lambda: LearnerStream("", 0))


class Copies:
    """Keeps the shard at most one version per fragment ahead of a standby, as long as the standby keeps pace."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # only fragments in which the standby keeps pace
        self._fell_behind: set[int] = set()

    def holds(self, fragment_id: int, version: int, announced: int) -> None:
        """The standby has `version`; the shard has announced `announced`."""
        if fragment_id not in self._fell_behind or version >= announced - 1:
            self._fell_behind.discard(fragment_id)
            self._held[fragment_id] = max(version, self._held.get(fragment_id, version))

    def may_announce(self, fragment_id: int, version: int) -> bool:
        """Whether the standby has the previous version, or does not keep pace."""
        return self._held.get(fragment_id, version) >= version - 1

    def falls_behind(self, fragment_id: int) -> None:
        """Stop waiting for the standby until it has caught up; otherwise it could delay the run again and again."""
        self._held.pop(fragment_id, None)
        self._fell_behind.add(fragment_id)

    def clear(self) -> None:
        self._held.clear()
        self._fell_behind.clear()


class Readers:
    def __init__(self) -> None:
        self.copies = Copies()
        self._open: dict[Reader, None] = {}  # oldest first
        self.away: dict[tuple[Role, str], float] = {}
        """Mirrors and standbys that no longer follow -> the time since which they are away."""
        self._places = Places[object](STREAMS_EACH, STREAMS_MAX, "readers follow this shard; try again later")

    def __iter__(self) -> Iterator[Reader]:
        return iter(self._open)

    @contextmanager
    def opened(self, caller: Identity, request: FollowRequest, now: Clock) -> Iterator[Reader]:
        """Hold this while a stream is open. Raises BadRequest, Busy, and WrongIdentity if the scope forbids the
        role."""
        if request.role not in {*Role}:
            raise BadRequest(f"FollowRequest.role is {request.role!r}, not one of {', '.join(Role)}")
        role = Role(request.role)
        caller.check_may(CALLS[role])
        with self._places.held(caller.account, f"streams of {caller.account or 'this host'}"):
            reader = Reader(caller.account, role, request.site, request.address, now())
            self._open[reader] = None
            self.away.pop((role, reader.name), None)
            try:
                yield reader
            finally:
                del self._open[reader]
                if not self.has_standby:
                    self.copies.clear()
                if role is not Role.OBSERVER and len(self.away) < STREAMS_MAX:
                    self.away[role, reader.name] = now()

    def tell(self, directive: Directive) -> None:
        """Pass on directives about versions and the shard. Standbys hear of versions once they are on disk."""
        if isinstance(directive, Committed | Pulse | Drain | Stop):
            for reader in self._open:
                if reader.role is not Role.STANDBY or not isinstance(directive, Committed):
                    reader.stream.send(directive)

    def is_on_disk(self, committed: Committed) -> None:
        for reader in self._open:
            if reader.role is Role.STANDBY:
                reader.stream.send(committed)

    def copied(self, fragment_id: int, version: int, announced: int) -> None:
        """A standby has this version. Ignored unless a standby follows: the shard would wait for its disk in vain."""
        if self.has_standby:
            self.copies.holds(fragment_id, version, announced)

    @property
    def has_mirrors(self) -> bool:
        return self._has(Role.MIRROR)

    @property
    def has_standby(self) -> bool:
        return self._has(Role.STANDBY)

    def _has(self, role: Role) -> bool:
        return any(reader.role is role for reader in self._open)

    def mirror_at(self, site: str) -> str:
        """The address of the mirror that has been at this site the longest; empty: there is none."""
        of_site = (r.address for r in self._open if r.role is Role.MIRROR and r.site == site)
        return next(of_site, "") if site else ""

    def end_all(self) -> None:
        for reader in self._open:
            reader.stream.end()
