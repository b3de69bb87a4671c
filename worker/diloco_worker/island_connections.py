"""The connections of one rank of an island. The leader's are those of a learner; the others only push and pull.

Which version is pulled, all ranks agree on first: a connection of an island says what its shard has announced, and
pulls what it is told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from diloco_common.wire.messages import Committed, Directive, Progress
from diloco_worker.connection import Connection
from diloco_worker.connections import Connections
from diloco_worker.context import ConnectionContext
from diloco_worker.core.acts import Act, FetchEnded, FetchVersion, LeaseTaken, PushContribution
from diloco_worker.core.events import Announced, Gone
from diloco_worker.core.pushes import Lease

Name = tuple[int, int]
"""Epoch and number of a version."""


class IslandConnections(Connections):
    """Of one rank."""

    def __init__(
        self, addresses: Sequence[str], progress: Progress, context: ConnectionContext,
        goodbye: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        """`goodbye` waits until all ranks leave."""
        self._goodbye = goodbye
        self._leases: dict[int, Lease] = {}  # by shard, as all ranks have agreed on
        super().__init__(addresses, progress, context)

    def _connect(self, address: str, progress: Progress) -> Connection:
        kind = FollowersConnection if self._c.caller.rank else LeadersConnection
        return kind(address, progress, self._c)

    async def leave(self, settle_s: float) -> None:
        """Pushes settle at all ranks before the leader says goodbye: with the lease, half contributions end."""
        await asyncio.gather(*(connection.settle(settle_s) for connection in self))
        await self._goodbye()
        await asyncio.gather(*(connection.leave(settle_s) for connection in self))

    def _perform(self, act: Act) -> None:
        match act:
            case PushContribution():
                # Written down for all ranks, and also if this one has no part of it, or no lease just now.
                self._c.telemetry.pushing(act, self._leases[act.shard_index])
                if not act.contribution.tensors.is_others:
                    super()._perform(act)
            case LeaseTaken():
                self._leases[act.joined.shard_index] = Lease(act.joined.epoch, act.joined.generation)
                for connection in self:
                    if connection.address == act.joined.address:
                        connection.take_lease(act.joined)
            case FetchVersion():
                owner = self._to(act.shard_index)
                if owner is not None:
                    owner.fetch(act)
            case FetchEnded():
                owner = self._to(act.shard_index)
                if owner is not None:
                    owner.fetch_ended(act)
            case _:
                super()._perform(act)


class LeadersConnection(Connection):
    """It pulls at once, which makes the shard hold the version for the others, and says so in the log.

    Of each fragment one version at a time, until all ranks have decided on it.
    """

    def __init__(self, address: str, progress: Progress, context: ConnectionContext) -> None:
        super().__init__(address, progress, context)
        self._under_way: dict[int, Name] = {}
        self._newest: dict[int, Name] = {}  # announced meanwhile
        self._applied: dict[int, Name] = {}
        self._said: dict[int, Name] = {}
        self._puller.found, self._puller.gone = self._found, self._gone

    async def _join(self) -> None:
        epoch = self.state.epoch
        await super()._join()
        if self.state.epoch != epoch:
            self._under_way.clear()
            self._newest.clear()
            self._said.clear()

    def _hear(self, directive: Directive) -> None:
        if isinstance(directive, Committed):
            self._check_owned(directive)
            self._newest[directive.fragment_id] = directive.epoch, directive.version
            self._begin(directive.fragment_id)
        else:
            super()._hear(directive)

    def newest(self, fragment_id: int) -> Name | None:
        found = (names.get(fragment_id) for names in (self._newest, self._under_way, self._applied))
        return next((name for name in found if name is not None), None)

    def _begin(self, fragment_id: int) -> None:
        """Pull the newest version, unless one is under way, or it is that which all have."""
        newest = self._newest.get(fragment_id)
        if newest is None or fragment_id in self._under_way:
            return
        del self._newest[fragment_id]
        if newest != self._applied.get(fragment_id):
            self._under_way[fragment_id] = newest
            self.state.announced[fragment_id] = newest
            self._puller.wake()

    def _found(self, fragment_id: int, version: Name) -> None:
        """The shard holds it from now on: the others may pull it."""
        if self._under_way.get(fragment_id) == version != self._said.get(fragment_id):
            self._said[fragment_id] = version
            self._c.inbox.put(Announced(fragment_id, *version))

    def _gone(self, fragment_id: int, version: Name) -> None:
        """It was superseded before the pull began; or the lease has ended since, and what it held."""
        if self._said.get(fragment_id) == version:
            self._c.inbox.put(Gone(fragment_id, *version))
        elif self._under_way.get(fragment_id) == version:
            del self._under_way[fragment_id]
            self._begin(fragment_id)

    def fetch(self, act: FetchVersion) -> None:
        """It is under way."""

    def fetch_ended(self, act: FetchEnded) -> None:
        name = act.epoch, act.version
        if act.is_applied:
            self._applied[act.fragment_id] = name
        elif self._said.get(act.fragment_id) != name:
            return  # of the shard's epoch before: in this one nobody has heard of it yet, and its name may be the same
        if self._under_way.get(act.fragment_id) == name:
            del self._under_way[act.fragment_id]
            self._said.pop(act.fragment_id, None)
            self._begin(act.fragment_id)


class FollowersConnection(Connection):
    """Of a rank that is not the leader: it neither joins nor attends."""

    async def _stay_connected(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def leave(self, at_most_s: float) -> None:
        """The leader does."""
