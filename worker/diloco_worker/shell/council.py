"""The council of a learner: the processes that decide together what happens at a step boundary.

A single process is a council of one: it decides from what it hears. The ranks of an island train one model in lockstep,
as DDP and FSDP2 do. Every rank has a whole learner: core, step boundary, codec thread, connections. Ranks differ in the
part of the model that they hold (core/parts.py), and in who talks to shards: the leader, rank 0, joins and attends; the
others push and pull under its lease. A rank first shares what it hears with the others, and all feed their cores with
the same events at the same boundary (core/council_log.py). docs/islands.md is the design.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from diloco_common.errors import IslandBroken
from diloco_common.wire.messages import Pulse
from diloco_worker.core.connection import AgreedPullTargets, LeaderPullTargets, PullTargets
from diloco_worker.core.council_log import CouncilLog, Turn, tokens_of
from diloco_worker.core.events import Arrived, Event, EventQueue, Failed
from diloco_worker.core.fragment import PendingContribution
from diloco_worker.core.learner import LearnerCore


class Inbox:
    """An event queue with one reader, the training thread, and one writer, the network thread."""

    def __init__(self) -> None:
        self._events = EventQueue()
        self._changed = threading.Condition()

    def put(self, event: Event) -> None:
        with self._changed:
            self._events.put(event)
            self._changed.notify()

    def pop(self) -> Event | None:
        """The oldest event; None: there is none. Never waits."""
        with self._changed:
            return self._events.pop()

    def unread(self) -> list[Event]:
        """A copy of the waiting events, oldest first."""
        with self._changed:
            return list(self._events)

    def wait(self, timeout_s: float) -> None:
        """Wait until there is an event, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > 0, timeout_s)


class Council:
    """A council of one process. Owned by the training thread, except for the inbox."""

    is_alone = True
    """Whether this process decides alone, and holds the whole model."""

    def __init__(self) -> None:
        self.inbox = Inbox()

    def to_pull(self) -> PullTargets:
        """Decides which versions this process pulls from a shard."""
        return PullTargets()

    # ------------------------------------------------------------ at a step boundary

    def hear(self) -> Turn:
        """The decisions at this boundary, except for the events that `pop` returns."""
        return Turn(None, (), ())

    def pop(self) -> Event | None:
        """The next decided event; None: none."""
        return self.inbox.pop()

    def stepped(self, core: LearnerCore, tokens: int) -> None:
        core.stepped(tokens)

    def trained(self, inner_step: int, tokens: int) -> tuple[int, int]:
        """Inner steps and tokens in the model, given the core's counts. Raises IslandBroken."""
        return inner_step, tokens

    def contributes(self, contribution: PendingContribution) -> None:
        """The contribution is about to be pushed."""

    def applies(self, arrived: Arrived, contribution: PendingContribution | None) -> None:
        """The version is about to be applied while the contribution is in flight."""

    def post(self, core: LearnerCore | None, pulse: Callable[[], Pulse], *, stop: bool, leave: bool) -> list[Failed]:
        """Share what this process knows, and whether it wants to stop or leave. Returns why it cannot."""
        return []

    # ------------------------------------------------------------ shared by all

    def pulse(self, mine: Pulse) -> Pulse:
        """The state of the run. `mine`: as this process knows it."""
        return mine

    def stops(self, *, is_asked: bool) -> bool:
        """Whether all stop. `is_asked`: this process was asked to."""
        return is_asked

    def leaves(self, *, is_asked: bool) -> bool:
        return is_asked

    def agree(self, text: str) -> str:
        """The leader's text. All ranks must call this, and wait for it."""
        return text

    async def goodbye(self) -> None:
        """Wait until all leave."""


class Exchange(Protocol):
    def begin(self, frame: bytes) -> None:
        """Post this rank's frame. Never waits."""

    def look(self) -> list[bytes] | None:
        """The frames posted last, in rank order. None: nothing was posted.

        Waits until every rank has posted: no longer than their own collectives make them wait. A single rank may call
        this. Raises IslandBroken.
        """

    def end(self) -> list[bytes] | None:
        """Like `look`; afterwards nothing counts as posted."""


class IslandCouncil(Council):
    """The council of an island's ranks, which all cross the same boundaries."""

    is_alone = False

    def __init__(
        self, rank: int, size: int, exchange: Exchange, goodbye: Callable[[], Awaitable[None]],
        agree: Callable[[str], str] = str,
    ) -> None:  # fmt: skip
        """`goodbye` waits until all ranks leave; `agree` returns the leader's text."""
        super().__init__()
        self._rank = rank
        self._log = CouncilLog(rank, size)
        self._exchange, self._goodbye, self._agree = exchange, goodbye, agree
        self._agreed: deque[Event] = deque()
        self._tokens: int | None = None
        self._has_asked_stop = self._has_asked_leave = False

    def to_pull(self) -> PullTargets:
        return AgreedPullTargets() if self._rank else LeaderPullTargets()

    def hear(self) -> Turn:
        """Read what all ranks posted at the previous boundary."""
        try:
            frames = self._exchange.end()
            turn = Turn(None, (), ()) if frames is None else self._log.hear(frames)
        except IslandBroken as error:
            turn = Turn(None, (Failed(error),), ())
        self._agreed.extend(turn.events)
        return turn

    def pop(self) -> Event | None:
        return self._agreed.popleft() if self._agreed else None

    def stepped(self, core: LearnerCore, tokens: int) -> None:
        """The tokens count at the next boundary, when the sum over all ranks is known."""
        self._tokens = tokens

    def trained(self, inner_step: int, tokens: int) -> tuple[int, int]:
        """The model already holds the last step, which the core counts at the next boundary."""
        frames = self._exchange.look()
        more = None if frames is None else tokens_of(frames)
        return (inner_step, tokens) if more is None else (inner_step + 1, tokens + more)

    def contributes(self, contribution: PendingContribution) -> None:
        contribution.may_have_arrived = True  # until `applies` knows

    def applies(self, arrived: Arrived, contribution: PendingContribution | None) -> None:
        """The version holds the contribution only if all ranks had sent their parts. Values that are not finite were
        never sent, so no version holds them."""
        if contribution is not None and arrived.version >= contribution.round:
            contribution.may_have_arrived = arrived.sent == contribution.tokens

    def post(self, core: LearnerCore | None, pulse: Callable[[], Pulse], *, stop: bool, leave: bool) -> list[Failed]:
        if core is not None and not self._log.elements:
            self._log.elements = {f.fragment_id: f.num_elements for f in core.manifest.fragments}
        while (event := self.inbox.pop()) is not None:
            if isinstance(event, Arrived) and core is not None:
                event = _with_what_was_sent(event, core.fragments[event.fragment_id].contribution)
            self._log.say(event)
        self._log.say_pulse(pulse())
        if stop and not self._has_asked_stop:
            self._has_asked_stop = True
            self._log.ask_stop()
        if leave and not self._has_asked_leave:
            self._has_asked_leave = True
            self._log.ask_leave()
        tokens, self._tokens = self._tokens, None
        try:
            self._exchange.begin(self._log.frame(tokens))
        except IslandBroken as error:
            return [Failed(error)]
        return []

    def pulse(self, mine: Pulse) -> Pulse:
        return self._log.pulse

    def stops(self, *, is_asked: bool) -> bool:
        return self._log.is_stop_asked

    def leaves(self, *, is_asked: bool) -> bool:
        return self._log.is_leave_asked

    def agree(self, text: str) -> str:
        return self._agree(text)

    async def goodbye(self) -> None:
        """Pushes of all ranks settle before the leader leaves: the end of the lease ends incomplete contributions."""
        await self._goodbye()


def _with_what_was_sent(arrived: Arrived, contribution: PendingContribution | None) -> Arrived:
    """Note what had been sent when the version arrived: it cannot hold anything sent later."""
    if contribution is None or not (contribution.tensors.is_others or contribution.pushes.may_have_arrived):
        return arrived
    return replace(arrived, sent=contribution.tokens)
