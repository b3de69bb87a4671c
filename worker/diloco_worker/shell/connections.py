"""The connections of one learner, one per shard. They run inside an event loop and carry out the learner's acts.

From `learner.step` to a shard and back, bytes change threads five times on the learner's side:

    1  training -> codec      the step boundary starts the snapshot and the encoding (`CodecThread.begin`)
    2  codec -> event loop    the payload is pushed (`Pusher`)
       ... the shard ...
    3  event loop -> codec    the pulled version is decoded (`CodecThread.decode`)
    4  codec -> event loop    the version is kept as the base of the next change (`Puller`)
    5  event loop -> training the version waits in the inbox for the next step boundary (`Inbox`)

In production a waker thread also brings the acts of the boundary to the event loop (network_thread.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from diloco_common.errors import DilocoError, Unavailable
from diloco_common.wire.manifest import Manifest
from diloco_common.wire.messages import Progress, Pulse
from diloco_worker.core.agreement import Agreement, Objections
from diloco_worker.core.events import (
    Act,
    Failed,
    Fetch,
    FetchEnded,
    Joined,
    LastRounds,
    ModelCut,
    OfferSeed,
    PushContribution,
    StepEnded,
)
from diloco_worker.core.fragment import Lease
from diloco_worker.shell.codec_thread import ConnectionContext
from diloco_worker.shell.connection import Connection


class Connections:
    """Made in any thread; `perform`, `run` and `leave` then belong to one event loop."""

    def __init__(self, addresses: Sequence[str], progress: Progress, context: ConnectionContext) -> None:
        self._c = context
        agreement, objections = Agreement(len(addresses), context.tensors), Objections(len(addresses))
        self._connections: list[Connection] = []
        for address in addresses:
            connection = Connection(address, progress, context, agreement, objections, self._connections)
            self._connections.append(connection)
        self._manifest: Manifest | None = None
        self._leases: dict[int, Lease] = {}  # by shard, as agreed by all ranks

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._connections)

    @property
    def pulse(self) -> Pulse:
        """The state of the run: the highest figures of all shards."""
        pulses = [connection.state.pulse for connection in self._connections]
        merged, budget = max(p.tokens_merged for p in pulses), max(p.tokens_budget for p in pulses)
        return Pulse(merged, budget, max(p.learners_alive for p in pulses))

    @property
    def index(self) -> int | None:
        """The learner's number, from the shard of lowest index that it has joined; None: it has joined none."""
        said = [(c.state.shard_index, c.state.index) for c in self._connections if c.state.shard_index is not None]
        return min(said)[1] if said else None

    @property
    def shards_up(self) -> set[int]:
        return {c.state.shard_index for c in self._connections if c.is_up and c.state.shard_index is not None}

    def figures(self) -> list[dict[str, Any]]:
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
        """Objections of shards against this learner, and failing transfers, as text; empty: none."""
        found = [
            f"{c.address}: {c.why_down} [{c.why_down.code}]"
            for c in self._connections
            if c.why_down is not None and not isinstance(c.why_down, Unavailable)
        ]
        pulls = [f"pulls from {c.address} fail: {c.puller.why_not}" for c in self if c.is_up and c.puller.why_not]
        return "; ".join([*found, *pulls, *filter(None, [self.failing_pushes])])

    @property
    def failing_pushes(self) -> str:
        """Which pushes do not get through, and why, as text; empty: none."""
        found = ((c, failing) for c in self._connections if c.is_up and (failing := c.pusher.failing).why)
        return "; ".join(f"pushes to {c.address} have failed for {f.for_s:.0f} s: {f.why}" for c, f in found)

    def perform(self, acts: Sequence[Act]) -> None:
        """Carry out the acts of one step boundary in order. An act that fails ends the learner, not this call."""
        for act in acts:
            try:
                self._perform(act)
                self._c.telemetry.count(act)
            except Exception as error:  # a bug of ours: otherwise only the event loop would know
                name = type(act).__name__
                self._c.telemetry.log.error("act failed", trace=error, act=name)
                self._c.inbox.put(Failed(DilocoError(f"{name} failed: {error!r}")))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:  # `gather` would not wait for tasks being cancelled
            for connection in self._connections:
                group.create_task(connection.run(), name=f"connection {connection.address}")

    async def leave(self, settle_s: float) -> None:
        """Give pushes in flight `settle_s` seconds to be answered, then send Leave. `run` goes on."""
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
                    # Recorded for all ranks, even if this one has no part of it or no lease just now.
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
        """The connection to a fragment's shard; None: that address now serves another shard."""
        shard_index = self._shard_of(fragment_id)
        return next((c for c in self._connections if c.state.shard_index == shard_index), None)
