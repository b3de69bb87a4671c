"""The network between learners and shards: calls and control streams that are lost, late, twice, cut, half-open.

A call may lose its request or its answer, arrive twice, or after later ones; its caller sees an error at once, or only
a deadline. A control stream keeps its order, as TCP does, but it may break for both ends, for one, or for none.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from diloco_common.errors import Refusal
from diloco_common.messages import Directive, Progress
from diloco_simulator.options import Options
from diloco_simulator.timeline import Alarm, Future, Process, Timeline

Respond = Callable[[Any], None]
"""Takes an answer, or the Refusal that a shard answers."""
Path = tuple[str, int]
"""Learner id and shard index."""


class Unavailable(Exception):
    """The call or the stream broke: nobody knows what became of the request."""


class ShardSide(Protocol):
    """The end of the network at a shard."""

    process: Process

    def call(self, method: str, request: Any, respond: Respond) -> None: ...
    def open(self, stream: Stream) -> None: ...
    def heard(self, stream: Stream, progress: Progress) -> None: ...
    def closed(self, stream: Stream) -> None: ...


class Network:
    """All paths of one cluster."""

    def __init__(self, timeline: Timeline, options: Options, faults: Counter[str]) -> None:
        self.timeline = timeline
        self.healed = False
        self.shards: dict[int, ShardSide] = {}
        """Those that run now."""
        self.cuts: dict[tuple[Path, bool], int] = {}
        """(path, upwards) -> cuts that are in force."""
        self.streams: list[Stream] = []
        self.random = random.Random(f"network {options.seed}")
        self._options = options
        self._faults = faults
        self._draw = self.random.random
        self._delay_s, self._long_delays = options.delay_s, options.long_delays

    def delay_s(self) -> float:
        """One way."""
        drawn = self._draw
        if not self.healed and drawn() < self._long_delays:
            self._faults["message late"] += 1
            return self.random.uniform(0.0, 3 * self._options.lease_s)
        return self._delay_s * (0.5 + drawn())

    def is_cut(self, path: Path, up: bool) -> bool:
        return self.cuts.get((path, up), 0) > 0

    def call(self, caller: Process, path: Path, method: str, request: Any, timeout_s: float) -> Future[Any]:
        """A unary call. Raises Unavailable, TimeoutError, or the Refusal that was answered."""
        outcome: Future[Any] = Future()
        caller.within(outcome, timeout_s)
        copies = 2 if self._happens(self._options.duplicates, "call twice") else 1
        for _ in range(copies):
            if self.is_cut(path, True) or self._happens(self._options.loss, "request lost"):
                self._maybe_fail(caller, outcome)
            else:
                self.timeline.later(self.delay_s(), self._arrive, caller, path, method, request, outcome)
        return outcome

    def _arrive(self, caller: Process, path: Path, method: str, request: Any, outcome: Future[Any]) -> None:
        shard = self.shards.get(path[1])
        if shard is None or not shard.process.alive or self.is_cut(path, True):
            self._maybe_fail(caller, outcome)
            return

        def respond(answer: Any) -> None:
            if (self.cuts and self.is_cut(path, False)) or self._happens(self._options.loss, "answer lost"):
                self._maybe_fail(caller, outcome)
            else:
                act = outcome.fail if isinstance(answer, Refusal) else outcome.set
                caller.later(self.delay_s(), act, answer)

        shard.process.deliver(shard.call, method, request, respond)

    def _maybe_fail(self, caller: Process, outcome: Future[Any]) -> None:
        """The caller learns that the call is lost, or waits for its deadline."""
        if self.healed or self.random.random() < 0.5:
            caller.later(self.delay_s(), outcome.fail, Unavailable())

    def _happens(self, probability: float, fault: str) -> bool:
        happens = not self.healed and probability > 0 and self.random.random() < probability
        if happens:
            self._faults[fault] += 1
        return happens

    def attend(
        self, client: Process, path: Path, generation: int, epoch: int, hear: Callable[[Directive], None],
        silence_s: float,
    ) -> Stream:  # fmt: skip
        """Open a control stream. That it did not work shows when nothing comes, or an error."""
        self.streams = [s for s in self.streams if not (s.client_done and s.shard_done)]
        stream = Stream(self, client, path, generation, epoch, hear, silence_s)
        self.streams.append(stream)
        stream.transmit(True, stream.opened)
        return stream

    def gone(self, process: Process, noticed: bool) -> None:
        """A process ended. Its peers notice now, or never (the machine lost power)."""
        for stream in self.streams:
            shard = stream.shard
            if stream.client is process:
                stream.client_done = True
                if noticed:
                    stream.transmit(True, stream.lost_client)
            elif shard is not None and shard.process is process:
                stream.shard_done = True
                if noticed:
                    stream.transmit(False, stream.come, Unavailable())

    def heal(self) -> None:
        """From now on everything arrives, once. Streams that were held up by a cut go on, or are dead for good."""
        self.healed = True
        self.cuts.clear()
        self.flush()

    def flush(self) -> None:
        """A cut ended."""
        for stream in self.streams:
            stream.flush()


class Stream:
    """One Attend: directives down, reports up, each in order."""

    def __init__(
        self, network: Network, client: Process, path: Path, generation: int, epoch: int,
        hear: Callable[[Directive], None], silence_s: float,
    ) -> None:  # fmt: skip
        """`hear` takes each directive in the client's process, and may raise the Refusal that ends the stream there."""
        self.client = client
        self.path = path
        self.generation = generation
        self.epoch = epoch
        self.shard: ShardSide | None = None
        self.client_done = False
        self.shard_done = False
        self.ended: Future[None] = Future()
        """For the client: set when the shard ends the stream. Raises what broke it, or TimeoutError after silence."""
        self._hear = hear
        self._silence = Alarm(client, silence_s, self._is_silent)
        self._network = network
        self._arrives_at = {True: 0.0, False: 0.0}
        self._held: dict[bool, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {True: [], False: []}
        self._dead = False

    # ------------------------------------------------------------ the learner's end

    def report(self, progress: Progress) -> None:
        self.transmit(True, self._deliver_report, progress)

    def cancel(self) -> None:
        """The learner gives the stream up."""
        self._silence.stop()
        if not self.client_done:
            self.client_done = True
            self.transmit(True, self.lost_client)

    # ------------------------------------------------------------ the shard's end

    def send(self, directive: Directive | Refusal | None) -> None:
        """None ends the stream, and a Refusal refuses it."""
        if not self.shard_done:
            self.transmit(False, self.come, directive)
            if directive is None or isinstance(directive, Refusal):
                self.shard_done = True

    # ------------------------------------------------------------ on the way

    def flush(self) -> None:
        """A cut ended: TCP sends again what it held, if neither end has given up since."""
        for up in (True, False):
            if self._held[up] and not self._network.is_cut(self.path, up):
                held, self._held[up] = self._held[up], []
                if self._network.random.random() < 0.5:
                    self._dead = True
                for act, args in held:
                    self.transmit(up, act, *args)

    def break_off(self, *, tell_client: bool, tell_shard: bool) -> None:
        """The connection is gone, and either end, both or none is told."""
        self._dead = True
        if tell_client:
            self.client.later(self._network.delay_s(), self.come, Unavailable())
        if tell_shard and self.shard is not None:
            self.shard.process.later(self._network.delay_s(), self.lost_client)

    def transmit(self, up: bool, act: Callable[..., None], *args: Any) -> None:
        """Call `act` at the other end, after all that was sent there before."""
        if self._dead:
            return
        network = self._network
        if self._held[up] or (network.cuts and network.is_cut(self.path, up)):
            self._held[up].append((act, args))
            return
        arrives_at, after_others = network.timeline.now + network.delay_s(), self._arrives_at[up] + 1e-6
        if arrives_at < after_others:
            arrives_at = after_others
        self._arrives_at[up] = arrives_at
        network.timeline.at(arrives_at, self._arrive, up, act, args)

    def _arrive(self, up: bool, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._dead:
            return
        if not up:
            self.client.deliver(act, *args)
        elif self.shard is not None:
            self.shard.process.deliver(act, *args)
        else:
            act(*args)

    def opened(self) -> None:
        shard = self._network.shards.get(self.path[1])
        if shard is None or not shard.process.alive:
            self.transmit(False, self.come, Unavailable())
            self.shard_done = True
            return
        self.shard = shard
        shard.process.deliver(shard.open, self)

    def lost_client(self) -> None:
        if self.shard is not None and not self.shard_done:
            self.shard_done = True
            self.shard.closed(self)

    def _deliver_report(self, progress: Progress) -> None:
        if self.shard is not None and not self.shard_done:
            self.shard.heard(self, progress)

    def come(self, item: Directive | Exception | None) -> None:
        """Something arrives at the learner's end."""
        if self.ended.done:
            return
        self._silence.put_off()
        if item is None:
            self.ended.set(None)
        elif isinstance(item, Exception):
            self.ended.fail(item)
        else:
            try:
                self._hear(item)
            except Refusal as refusal:
                self.ended.fail(refusal)

    def _is_silent(self) -> None:
        self.ended.fail(TimeoutError())
