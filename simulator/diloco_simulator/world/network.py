"""The network between learners and shards: calls that are lost, late, duplicated, cut off, torn or half-open.

A `NetworkCall` is one call of diloco.v1: items go up and down, in order in each direction, as in one TCP connection.
When it breaks, both ends may notice, or one, or neither. Different calls may overtake each other.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from diloco_common.errors import Refusal
from diloco_common.ports import ShardService, Unavailable
from diloco_simulator.lies import Sniffed
from diloco_simulator.options import SOMETIMES, Options
from diloco_simulator.world.process import SimulatedProcess, Timeline

Path = tuple[str, int]
"""Learner id and shard index."""
Answer = Callable[[ShardService, AsyncIterator[Any]], AsyncIterator[Any]]
"""A shard's side of a call. It takes items and yields items."""


SNIFFED_MAX = 32


class End:
    """The last item of a direction."""


class Network:
    def __init__(
        self, timeline: Timeline, options: Options, faults: Counter[str], said: Callable[[Any, Path], None]
    ) -> None:
        """`said` is called with every item that a shard sends, and with the item's path."""
        self.timeline = timeline
        self.said = said
        self.healed = False
        self.serving: dict[int, tuple[SimulatedProcess, ShardService]] = {}
        """Shard index -> the process and the service that currently serve this shard."""
        self.apart: dict[Path, tuple[SimulatedProcess, ShardService]] = {}
        """Paths on which another process answers: a shard that a standby has replaced."""
        self.cuts: Counter[tuple[Path, bool]] = Counter()
        """(path, upwards) -> number of active cuts."""
        self.sniffed: deque[Sniffed] = deque(maxlen=SNIFFED_MAX)
        """Recent pushes of all learners, including hostile ones."""
        self.calls: list[NetworkCall] = []
        self.random = random.Random(f"network {options.seed}")
        self._options = options
        self._faults = faults

    def delay_s(self) -> float:
        if not self.healed and self.random.random() < self._options.long_delays:
            self._faults["message late"] += 1
            return self.random.uniform(0.0, 3 * self._options.lease_s)
        return self._options.delay_s * (0.5 + self.random.random())

    def happens(self, probability: float, fault: str) -> bool:
        happens = not self.healed and probability > 0 and self.random.random() < probability
        if happens:
            self._faults[fault] += 1
        return happens

    def open(self, client: SimulatedProcess, path: Path, answer: Answer, *, is_short: bool) -> NetworkCall:
        """Start a call. A short one may lose its request or its answer, or arrive twice."""
        call = NetworkCall(self, client, path, answer)
        if is_short:
            call.pauses = self.random.random() < SOMETIMES
            call.loses_request = self.happens(self._options.loss, "request lost")
            call.loses_answer = self.happens(self._options.loss, "answer lost")
            call.is_twice = self.happens(self._options.duplicates, "call twice")
        self.calls = [c for c in self.calls if not c.is_over]
        self.calls.append(call)
        call._transmit(True, call._accept)
        return call

    def gone(self, process: SimulatedProcess, noticed: bool) -> None:
        """A process ended. Its peers notice now, or never (if the machine lost power)."""
        for call in self.calls:
            call.gone(process, noticed)

    def heal(self) -> None:
        """From now on everything arrives exactly once. Calls held up by a cut go on, or are dead for good."""
        self.healed = True
        self.cuts.clear()
        self.flush()

    def flush(self) -> None:
        """A cut has ended: let the calls go on that it held up."""
        for call in self.calls:
            call.flush()


class NetworkCall:
    """One call: the client's end, the shard's end, and the items in between."""

    def __init__(self, network: Network, client: SimulatedProcess, path: Path, answer: Answer) -> None:
        self.path = path
        self.loses_request = self.loses_answer = self.is_twice = False
        self.pauses = True
        """Whether items travel one by one, so that other events may happen between them."""
        self._network, self._timeline = network, network.timeline
        self._client = client
        self._answer = answer
        self._came: asyncio.Queue[Any] = asyncio.Queue()  # items that have reached the client
        self._handlers: list[_CallHandler] = []
        self._given_up = False  # whether the client has given up
        self._dead = False
        self._arrives_at = {True: 0.0, False: 0.0}
        self._held: dict[bool, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {True: [], False: []}

    @property
    def is_over(self) -> bool:
        return self._given_up and all(handler.is_over for handler in self._handlers)

    # ------------------------------------------------------------ the client's end

    def send(self, *items: Any) -> None:
        """Send items, together or with pauses. Raises Unavailable once the client knows that the call is over."""
        if self._given_up:
            raise Unavailable("the call is over")
        if self.loses_request:
            self._break_or_not()
        elif self.pauses:
            for item in items:
                self._transmit(True, self._to_handlers, item)
        else:
            self._transmit(True, self._to_handlers, *items)

    async def receive(self) -> Any:
        """The next item; `End` at the end. Raises a Refusal or Unavailable."""
        item = await self._came.get()
        if isinstance(item, Exception):
            self._came.put_nowait(item)  # for the next caller
            raise item
        return item

    def cancel(self) -> None:
        """Give up the call. The shard may hear of it."""
        if not self._given_up:
            self._given_up = True
            self._transmit(True, self._cancel_handlers)

    # ------------------------------------------------------------ the shard's end

    def answer(self, *items: Any) -> None:
        """Send items to the client; an Exception or End is the last one."""
        for item in items:
            self._network.said(item, self.path)
        if self.loses_answer:
            self._break_or_not()
        else:
            self._transmit(False, self._come, *items)

    def _accept(self) -> None:
        serving = self._network.apart.get(self.path) or self._network.serving.get(self.path[1])
        if serving is None or not serving[0].alive:
            self._break_or_not(always=self._network.random.random() < 0.8)  # the port is closed, or the machine is off
            return
        process, service = serving
        for copy in range(2 if self.is_twice else 1):
            handler = _CallHandler(self, process, self._answer, service, answers=copy == 0)
            self._handlers.append(handler)
            if copy:
                later = self._timeline.now + self._network.delay_s()
                self._timeline.at(later, handler.begin, process=process)
            else:
                process.do(handler.begin, ())

    def _to_handlers(self, *items: Any) -> None:
        for handler in self._handlers:
            handler.process.do(handler.take, items)

    def _cancel_handlers(self) -> None:
        for handler in self._handlers:
            handler.process.do(handler.cancel, ())

    # ------------------------------------------------------------ on the way

    def flush(self) -> None:
        """A cut has ended: TCP resends what it held, unless one end has given up."""
        for up in (True, False):
            if self._held[up] and not self._network.cuts[self.path, up]:
                held, self._held[up] = self._held[up], []
                if self._network.random.random() < 0.5:
                    self._dead = True
                for act, args in held:
                    self._transmit(up, act, *args)

    def break_off(self, *, tell_client: bool, tell_shard: bool) -> None:
        """Break the connection. Both ends are told, or one, or neither."""
        if tell_client:
            reset = Unavailable("the connection was reset")
            self._timeline.at(self._timeline.now + self._network.delay_s(), self._come, reset, process=self._client)
        if tell_shard:
            self._timeline.later(self._network.delay_s(), self._cancel_handlers)
        self._dead = True

    def gone(self, process: SimulatedProcess, noticed: bool) -> None:
        if process is self._client:
            self._given_up = True
            if noticed:
                self._transmit(True, self._cancel_handlers)
        for handler in self._handlers:
            if handler.process is process and not handler.is_over:
                handler.is_over = True
                if noticed:
                    self._transmit(False, self._come, Unavailable("the shard is gone"))

    def _break_or_not(self, *, always: bool = False) -> None:
        """Tell the client that the call is lost, or let the client wait until its deadline."""
        if always or self._network.healed or self._network.random.random() < 0.5:
            self._transmit(False, self._come, Unavailable("the call was lost"))

    def _transmit(self, up: bool, act: Callable[..., None], *args: Any) -> None:
        """Call `act` at the other end, after everything that was sent there before."""
        if self._dead:
            return
        network = self._network
        if self._held[up] or (network.cuts and network.cuts[self.path, up]):
            self._held[up].append((act, args))
            return
        arrives_at = max(network.timeline.now + network.delay_s(), self._arrives_at[up] + 1e-6)
        self._arrives_at[up] = arrives_at
        network.timeline.at(arrives_at, self._arrive, act, args, process=None if up else self._client)

    def _arrive(self, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self._dead:
            act(*args)

    def _come(self, *items: Any) -> None:
        for item in items:
            if item is End or isinstance(item, Exception):
                self._given_up = True
            self._came.put_nowait(item)


class _CallHandler:
    def __init__(
        self, call: NetworkCall, process: SimulatedProcess, answer: Answer, service: ShardService, *, answers: bool
    ) -> None:
        self.process = process
        self.is_over = False
        self._call = call
        self._answer = answer
        self._service = service
        self._answers = answers
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if not self.is_over:
            self._task = self.process.start(self._run(), f"handler {self._call.path}")

    def take(self, *items: Any) -> None:
        for item in items:
            self._requests.put_nowait(item)

    def cancel(self) -> None:
        """Cancel the handler, as gRPC does when a call ends."""
        self.is_over = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        said: list[Any] = []
        try:
            async for item in self._answer(self._service, self._items()):
                said.append(item)
                if self._call.pauses:
                    self._say(said)
            said.append(End)
        except Refusal as refusal:
            said.append(refusal)
        except Exception as error:
            self.process.timeline.fail(error)  # the product raised something other than a refusal
        finally:
            self._say(said)
            self.is_over = True

    async def _items(self) -> AsyncIterator[Any]:
        while (item := await self._requests.get()) is not End:
            yield item

    def _say(self, said: list[Any]) -> None:
        if self._answers and not self.is_over:
            self._call.answer(*said)
        said.clear()
