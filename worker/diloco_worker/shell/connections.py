"""The connections of one learner, one per shard. They run inside an event loop and carry out its acts.

From `learner.step` to a shard and back, the bytes change threads five times on the learner's side:

    1  training -> codec      the step boundary begins the snapshot and the encoding (`CodecThread.begin`)
    2  codec -> event loop    the payload is pushed (`Pusher`)
       ... the shard ...
    3  event loop -> codec    the version that was pulled is decoded (`CodecThread.decode`)
    4  codec -> event loop    the version is held, for the next change (`Puller`)
    5  event loop -> training the version waits in the inbox for the next step boundary (`Inbox`)

Beside 1 and 2, in production the waker thread brings the acts of the boundary to the event loop (network_thread.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from diloco_common.errors import DilocoError, Unavailable
from diloco_common.wire.manifest import Manifest
from diloco_common.wire.messages import Progress, Pulse, ShardAway
from diloco_worker.core.acts import Act, LastRounds, ModelCut, OfferSeed, PushContribution, StepEnded
from diloco_worker.core.agreement import Agreement, Objections
from diloco_worker.core.connection import Lease
from diloco_worker.core.council_log import Fetch, FetchEnded
from diloco_worker.core.events import Failed, Joined
from diloco_worker.shell.connection import Connection
from diloco_worker.shell.context import ConnectionContext


class Connections:
    """Made anywhere; from then on `perform`, `run` and `leave` belong to one event loop."""

    def __init__(self, addresses: Sequence[str], progress: Progress, context: ConnectionContext) -> None:
        self._c = context
        self._connections = [Connection(address, progress, context) for address in addresses]
        self._manifest: Manifest | None = None
        self._leases: dict[int, Lease] = {}  # by shard, as all ranks have agreed on
        agreement, objections = Agreement(len(addresses), context.tensors), Objections(len(addresses))
        for connection in self._connections:
            connection.others_away = self._away
            connection.agreement, connection.objections = agreement, objections
            connection.num_gone = self._num_gone

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._connections)

    @property
    def pulse(self) -> Pulse:
        """The state of the run, as the shard says that is furthest."""
        pulses = [connection.state.pulse for connection in self._connections]
        merged, budget = max(p.tokens_merged for p in pulses), max(p.tokens_budget for p in pulses)
        return Pulse(merged, budget, max(p.learners_alive for p in pulses))

    @property
    def index(self) -> int | None:
        """The learner's number, as the first shard counts that has said it; None: none has."""
        said = [(c.state.shard_index, c.state.index) for c in self._connections if c.state.shard_index is not None]
        return min(said)[1] if said else None

    @property
    def shards_up(self) -> set[int]:
        """Indices of the shards that speak on their control streams."""
        return {c.state.shard_index for c in self._connections if c.is_up and c.state.shard_index is not None}

    def figures(self) -> list[dict[str, Any]]:
        """JSON of each connection."""
        return [
            {
                "address": c.address,
                "index": c.state.shard_index,
                "connected": c.is_up,
                "code": None if c.why_down is None else c.why_down.code,
                "why": "" if c.why_down is None else str(c.why_down),
                "generation": c.state.lease.generation,
                "epoch": c.state.epoch,
                "reconnects": max(0, c.times_up - 1),
            }
            for c in self._connections
        ]

    @property
    def objections(self) -> str:
        """What shards have against this learner, or what keeps bytes from passing, in words; empty: nothing."""
        found = [
            f"{c.address}: {c.why_down} [{c.why_down.code}]"
            for c in self._connections
            if c.why_down is not None and not isinstance(c.why_down, Unavailable)
        ]
        pulls = [f"pulls from {c.address} fail: {c.puller.why_not}" for c in self if c.is_up and c.puller.why_not]
        return "; ".join([*found, *pulls, *filter(None, [self.failing_pushes])])

    @property
    def failing_pushes(self) -> str:
        """Where the bytes of this learner do not get through, and why not; empty: nowhere."""
        found = ((c, failing) for c in self._connections if c.is_up and (failing := c.pusher.failing) is not None)
        return "; ".join(f"pushes to {c.address} have failed for {f.for_s:.0f} s: {f.why}" for c, f in found)

    def _num_gone(self) -> int:
        return sum(connection.is_gone for connection in self._connections)

    def _away(self) -> tuple[ShardAway, ...]:
        """The shards that this learner does not reach."""
        return tuple(away for connection in self._connections if (away := connection.away) is not None)

    def perform(self, acts: Sequence[Act]) -> None:
        """Carry out the acts of one step boundary, in their order. One that fails ends the learner, not this."""
        for act in acts:
            try:
                self._perform(act)
                self._c.telemetry.count(act)
            except Exception as error:  # ours: otherwise only the event loop would hear of it
                name = type(act).__name__
                self._c.telemetry.log.error("act failed", trace=error, act=name)
                self._c.inbox.put(Failed(DilocoError(f"{name} failed: {error!r}")))

    async def run(self) -> None:
        """Keep all connections up until cancelled."""
        async with asyncio.TaskGroup() as group:  # `gather` would not wait for what is being cancelled
            for connection in self._connections:
                group.create_task(connection.run(), name=f"connection {connection.address}")

    async def leave(self, settle_s: float) -> None:
        """Give pushes that are under way so many seconds to be answered; then say goodbye. `run` goes on."""
        await asyncio.gather(*(connection.settle(settle_s) for connection in self._connections))
        await self._c.council.goodbye()
        await asyncio.gather(*(connection.leave(settle_s) for connection in self._connections))

    def _perform(self, act: Act) -> None:
        match act:
            case ModelCut():
                self._manifest = act.manifest
                self._c.codec.own(act.tensors)
                for connection in self._connections:
                    connection.model_is_cut(act.manifest)
            case PushContribution():
                if not self._c.council.is_alone:
                    # Written down for all ranks, and also if this one has no part of it, or no lease just now.
                    self._c.telemetry.pushing(act, self._leases[self._shard_of(act.contribution.fragment_id)])
                owner = self._owner(act.contribution.fragment_id)
                if owner is not None and not act.contribution.tensors.is_others:
                    owner.pusher.push(act)
            case OfferSeed():
                if (owner := self._owner(act.fragment_id)) is not None:
                    owner.pusher.seed(act)
            case StepEnded():
                for connection in self._connections:
                    connection.report(act.progress)
            case LastRounds():
                for connection in self._connections:
                    connection.ask_last_rounds(act.fragment_ids)
            case Joined():
                self._leases[act.shard_index] = Lease(act.epoch, act.generation)
                for connection in self._connections:
                    if connection.address == act.address:
                        connection.take_lease(act)
            case Fetch():
                if (owner := self._owner(act.fragment_id)) is not None:
                    owner.fetch(act)
            case FetchEnded():
                if (owner := self._owner(act.fetch.fragment_id)) is not None:
                    owner.fetch_ended(act)

    def _shard_of(self, fragment_id: int) -> int:
        assert self._manifest is not None
        return self._manifest.fragments[fragment_id].shard_index

    def _owner(self, fragment_id: int) -> Connection | None:
        """The one to the shard of a fragment; None: it came back as another one."""
        shard_index = self._shard_of(fragment_id)
        return next((c for c in self._connections if c.state.shard_index == shard_index), None)
