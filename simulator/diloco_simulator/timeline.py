"""Virtual time, processes that crash and freeze, and coroutines that wait in them.

Everything that happens is a call at a time, in order of (time, order of asking): nothing depends on the machine.
Coroutines stand for asyncio tasks, so that the modelled shells read like the real ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Act = Callable[..., None]


class Timeline:
    """The clock, and what is still to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._later: list[tuple[float, int, Process | None, Act, tuple[Any, ...]]] = []
        self._soon: deque[tuple[Act, tuple[Any, ...]]] = deque()
        self._asked = 0
        self._stopped = False

    def later(self, delay_s: float, act: Act, *args: Any) -> None:
        """Call `act` in `delay_s` seconds."""
        self._asked += 1
        heappush(self._later, (self.now + delay_s, self._asked, None, act, args))

    def at(self, time_s: float, act: Act, *args: Any) -> None:
        """Call `act` at a time to come."""
        self._asked += 1
        heappush(self._later, (time_s, self._asked, None, act, args))

    def soon(self, act: Act, *args: Any) -> None:
        """Call `act` now, after what was asked for now before."""
        self._soon.append((act, args))

    def run(self) -> int:
        """Let one thing after the other happen, each with all that follows from it at once, until `stop`.

        Returns how many there were.
        """
        later, soon, popleft = self._later, self._soon, self._soon.popleft
        events = 0
        while not self._stopped:
            self.now, _, process, act, args = heappop(later)
            if process is None or (process.alive and not process.frozen):
                act(*args)
            else:
                process.deliver(act, *args)
            while soon:
                act, args = popleft()
                act(*args)
            events += 1
        return events

    def stop(self) -> None:
        self._stopped = True


class Future(Generic[T]):
    """A value or an error that comes later, for one coroutine that waits."""

    __slots__ = ("_error", "_task", "_value", "done")

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._task: Task | None = None

    def set(self, value: T) -> None:
        """The first outcome counts."""
        if not self.done:
            self.done, self._value = True, value
            if self._task is not None:
                self._task.wake_soon()

    def fail(self, error: Exception) -> None:
        if not self.done:
            self.done, self._error = True, error
            if self._task is not None:
                self._task.wake_soon()

    def time_out(self, process: Process) -> None:
        """The time of whoever waits, in this process, is over."""
        if not self.done:
            process.deliver(self.fail, TimeoutError())

    def __await__(self) -> Generator[Future[T], None, T]:
        if not self.done:
            yield self
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class Task:
    """A coroutine that runs in a process."""

    def __init__(self, process: Process, coroutine: Coroutine[Future[Any], None, None], name: str) -> None:
        self.process = process
        self.name = name
        self.done = False
        self._coroutine = coroutine

    def wake_soon(self) -> None:
        """What it waited for is there."""
        self.process.timeline._soon.append((self._wake, ()))

    def _wake(self) -> None:
        process = self.process
        if process.frozen:
            process.deliver(self._wake)
        elif process.alive and not self.done:
            try:
                self._coroutine.send(None)._task = self
            except StopIteration:
                self.done = True

    def cancel(self) -> None:
        """End it where it waits; its `finally` blocks run."""
        if not self.done:
            self.done = True
            self._coroutine.close()


class _Limit:
    """All waits of one process for one length of time: they end in the order in which they began.

    So one event at a time is enough for all of them, and most waits are over long before it happens.
    """

    def __init__(self, process: Process, seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self._waits: deque[tuple[float, Future[Any]]] = deque()
        self._is_set = False

    def watch(self, future: Future[Any]) -> None:
        due = self._process.timeline.now + self._seconds
        self._waits.append((due, future))
        if not self._is_set:
            self._is_set = True
            self._process.timeline.later(self._seconds, self._ring)

    def _ring(self) -> None:
        waits, now = self._waits, self._process.timeline.now
        while waits and (waits[0][1].done or waits[0][0] <= now):
            waits.popleft()[1].time_out(self._process)
        self._is_set = bool(waits)
        if waits:
            self._process.timeline.later(waits[0][0] - now, self._ring)


class Process:
    """Runs until it is killed. While it is frozen, what should have happened in it waits for the thaw."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline = timeline
        self.name = name
        self.alive = True
        self.frozen = False
        self._backlog: list[tuple[Act, tuple[Any, ...]]] = []
        self._tasks: list[Task] = []
        self._limits: dict[float, _Limit] = {}

    def deliver(self, act: Act, *args: Any) -> None:
        """Something happens in this process: a message came, a timer rang."""
        if self.frozen:
            self._backlog.append((act, args))
        elif self.alive:
            act(*args)

    def later(self, delay_s: float, act: Act, *args: Any) -> None:
        """Call `act` in `delay_s` seconds, if the process runs then."""
        timeline = self.timeline
        timeline._asked += 1
        heappush(timeline._later, (timeline.now + delay_s, timeline._asked, self, act, args))

    def spawn(self, coroutine: Coroutine[Future[Any], None, None], name: str) -> Task:
        """Start a coroutine; it runs up to its first wait at once after this."""
        self._tasks = [t for t in self._tasks if not t.done]
        task = Task(self, coroutine, name)
        self._tasks.append(task)
        task.wake_soon()
        return task

    def sleep(self, seconds: float) -> Future[None]:
        future: Future[None] = Future()
        self.later(seconds, future.set, None)
        return future

    def within(self, future: Future[T], seconds: float) -> Future[T]:
        """The same future; it raises TimeoutError if it takes longer."""
        limit = self._limits.get(seconds)
        if limit is None:
            limit = self._limits[seconds] = _Limit(self, seconds)
        limit.watch(future)
        return future

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for act, args in backlog:
            self.timeline.soon(self.deliver, act, *args)

    def kill(self) -> None:
        self.alive = self.frozen = False
        self._backlog.clear()
        for task in self._tasks:
            task.cancel()


class Alarm:
    """Rings in a process whenever it was not put off for so many seconds, until it is stopped.

    To put it off costs nothing: it looks when it was due first, and then goes on to when it is due by now.
    """

    def __init__(self, process: Process, seconds: float, ring: Callable[[], None]) -> None:
        self._process = process
        self._seconds = seconds
        self._ring: Callable[[], None] | None = ring
        self.put_off()
        process.later(seconds, self._look)

    def put_off(self) -> None:
        self._due = self._process.timeline.now + self._seconds

    def stop(self) -> None:
        self._ring = None

    def _look(self) -> None:
        if self._ring is not None:
            now = self._process.timeline.now
            if now >= self._due:
                self.put_off()
                self._ring()
            self._process.later(self._due - now, self._look)


class Signal:
    """Set until somebody who waits for it clears it, as asyncio.Event."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiting is not None:
            self._waiting.set(None)

    def clear(self) -> None:
        self._is_set = False

    def wait(self) -> Future[None]:
        self._waiting = Future()
        if self._is_set:
            self._waiting.set(None)
        return self._waiting
