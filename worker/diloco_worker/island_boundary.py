"""The step boundary of an island's rank: the same decisions at the same boundary in all ranks.

Each rank runs the whole core of a learner, and all ranks feed it with the same events (core/island_log.py). What a rank
hears from shards it says to the others first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from diloco_common.errors import IslandBroken
from diloco_common.ports import World
from diloco_common.wire.messages import Pulse
from diloco_worker.boundary import Start, StepBoundary
from diloco_worker.core.acts import Act, FetchEnded, FetchVersion, GiveUp, LeaseTaken, PushContribution, SeedFragment
from diloco_worker.core.events import Arrived, Event, Joined
from diloco_worker.core.island_log import Fetch, IslandLog, Turn, tokens_of
from diloco_worker.core.parts import LocalFragment
from diloco_worker.core.replica import Replica
from diloco_worker.inbox import Inbox
from diloco_worker.island_exchange import Exchange


class IslandBoundary(StepBoundary):
    """Of one rank. All ranks of the island call `stepped` and `cross` alike."""

    def __init__(
        self, replica: Replica, addresses: Sequence[str], inbox: Inbox, pulse: Callable[[], Pulse], world: World,
        start: Start, log: IslandLog, exchange: Exchange,
    ) -> None:  # fmt: skip
        """`pulse`: the state of the run, as this rank hears it; only the leader does."""
        self._agreed = Agreed()
        super().__init__(replica, addresses, self._agreed, lambda: log.pulse, world, start)
        self._log = log
        self._exchange = exchange
        self._own_inbox = inbox
        self._own_pulse = pulse
        self._tokens: int | None = None
        self._has_asked_stop = self._has_asked_leave = False

    @property
    def is_stop_asked(self) -> bool:
        return self._log.is_stop_asked

    @property
    def is_leave_asked(self) -> bool:
        return self._log.is_leave_asked

    def stepped(self, tokens: int) -> None:
        """This rank's tokens. They count at the next boundary, when the sum over all ranks is known."""
        self._tokens = tokens

    def trained(self) -> tuple[int, int]:
        """The model holds the last step already; the core counts it at the next boundary. Raises IslandBroken."""
        inner_step, tokens = super().trained()
        frames = self._exchange.look()
        more = None if frames is None else tokens_of(frames)
        return (inner_step, tokens) if more is None else (inner_step + 1, tokens + more)

    def has_what_can_be_had(self, shards_up: set[int]) -> bool:
        """An island waits for every shard: what is up differs between ranks."""
        return False

    def cross(self, apply_s: float = math.inf) -> list[Act]:
        """As of a learner alone, with what all ranks have posted at the boundary before. Posts what this rank knows."""
        try:
            frames = self._exchange.end()
            turn = Turn(None, (), ()) if frames is None else self._log.hear(frames)
            acts = self._act_on(turn)
            if not any(isinstance(act, GiveUp) for act in acts):
                self._post()
        except IslandBroken as error:
            return [GiveUp(error)]
        return acts

    def _act_on(self, turn: Turn) -> list[Act]:
        if turn.tokens is not None:
            self._core.stepped(turn.tokens)
        self._agreed.put_all(turn.events)
        acts: list[Act] = [LeaseTaken(event) for event in turn.events if isinstance(event, Joined)]
        acts += [mine for act in super().cross() if (mine := self._own_part(act)) is not None]
        if self.core is not None and not self._log.elements:
            self._log.elements = {f.fragment_id: f.num_elements for f in self.core.manifest.fragments}
        acts += [FetchVersion(f.fragment_id, self._owner(f), f.epoch, f.version) for f in turn.fetches]
        acts += [FetchEnded(f.fragment_id, self._owner(f), f.epoch, f.version, done) for f, done in turn.ended]
        return acts

    def _own_part(self, act: Act) -> Act | None:
        """What this rank does of an act; None: nothing."""
        match act:
            case PushContribution():
                act.contribution.may_have_arrived = True  # until a version tells: `_apply`
            case SeedFragment():
                own = self._local(act.fragment_id).own
                return replace(act, values=act.values[own]) if own.stop > own.start else None
        return act

    def _apply(self, event: Arrived) -> None:
        """What this version tells of a contribution goes by what all ranks had sent of it. Values that are not finite
        were never sent: no version holds them."""
        contribution = self._core.fragments[event.fragment_id].contribution
        if contribution is not None and event.version >= contribution.round:
            contribution.may_have_arrived = event.sent == contribution.tokens
        super()._apply(event)

    def _with_what_was_sent(self, arrived: Arrived) -> Arrived:
        """After it came: of what is sent from now on, it holds nothing."""
        contribution = self._core.fragments[arrived.fragment_id].contribution
        if contribution is None or not (contribution.tensors.is_others or contribution.pushes.may_have_arrived):
            return arrived
        return replace(arrived, sent=contribution.tokens)

    def _local(self, fragment_id: int) -> LocalFragment:
        return self._core.fragments[fragment_id].tensors.fragment

    def _owner(self, fetch: Fetch) -> int:
        return self._core.manifest.fragments[fetch.fragment_id].shard_index

    def _post(self) -> None:
        while (event := self._own_inbox.pop()) is not None:
            self._log.say(self._with_what_was_sent(event) if isinstance(event, Arrived) else event)
        self._log.say_pulse(self._own_pulse())
        if self._is_stop_asked and not self._has_asked_stop:
            self._has_asked_stop = True
            self._log.ask_stop()
        if self.leave_asked_at is not None and not self._has_asked_leave:
            self._has_asked_leave = True
            self._log.ask_leave()
        tokens, self._tokens = self._tokens, None
        self._exchange.begin(self._log.frame(tokens))


class Agreed(Inbox):
    """Events that all ranks have agreed on, in their order. Filled and emptied in the training thread."""

    def __init__(self) -> None:
        super().__init__()
        self._agreed: deque[Event] = deque()

    def put_all(self, events: Sequence[Event]) -> None:
        self._agreed.extend(events)

    def pop(self) -> Event | None:
        return self._agreed.popleft() if self._agreed else None

    def put_back(self, event: Event) -> None:
        raise AssertionError("an island never reads later, so no version waits for a snapshot")
