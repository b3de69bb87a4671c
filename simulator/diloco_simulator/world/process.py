"""Virtual time and its processes, each an asyncio event loop with threads. They can be frozen, and killed anywhere.

Events happen in order of time, and at equal times in the order in which they were requested. Nothing depends on the
machine, so the same seed gives the same schedule.

Production code runs in it unchanged: its coroutines wait with asyncio, and its executors come from `World`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from asyncio import Future, Handle, Task, TimerHandle
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from concurrent.futures import Future as ThreadFuture
from contextvars import Context
from functools import partial
from heapq import heappop, heappush
from typing import Any, TypeVar
from weakref import WeakSet

from diloco_common.ports import World

T = TypeVar("T")
Act = Callable[..., Any]
Takes = Callable[[str], float]
"""Name of an executor -> mean time of its jobs, in seconds."""
STUTTER_S = 0.01
"""How far a process's clock may jump at one point in virtual time, as if some code were slow."""


class Timeline:
    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._later: list[tuple[float, int, SimulatedProcess | None, Act, tuple[Any, ...]]] = []
        self._soon: deque[tuple[SimulatedProcess | None, Act, tuple[Any, ...]]] = deque()
        self._asked = 0
        self._stopped = False
        self._error: BaseException | None = None

    def at(self, time_s: float, act: Act, *args: Any, process: SimulatedProcess | None = None) -> None:
        self._asked += 1
        heappush(self._later, (time_s, self._asked, process, act, args))

    def later(self, delay_s: float, act: Act, *args: Any) -> None:
        self.at(self.now + delay_s, act, *args)

    def soon(self, process: SimulatedProcess | None, act: Act, *args: Any) -> None:
        """Call `act` now, after everything else that was requested for now."""
        self._soon.append((process, act, args))

    def run(self) -> None:
        """Run scheduled acts in order until `stop`. What an act requests for now runs before the next one.
        Raises the error passed to `fail`."""
        later, soon = self._later, self._soon
        while not self._stopped:
            if soon:
                process, act, args = soon.popleft()
            else:
                self.now, _, process, act, args = heappop(later)
            self.events += 1
            if process is None:
                act(*args)
            else:
                process.do(act, args)
            if self._error is not None:
                raise self._error

    def stop(self) -> None:
        self._stopped = True

    def fail(self, error: BaseException) -> None:
        """End the schedule with an error from code that cannot raise it to `run`."""
        self._error = self._error or error


class SimulatedProcess:
    """A process that runs until it is killed. While it is frozen, its events wait for the thaw."""

    def __init__(self, timeline: Timeline, name: str, seed: str, takes_s: Takes, *, stutters: float = 0.0) -> None:
        """`stutters`: probability that two looks at the clock, one right after the other, are `STUTTER_S` apart."""
        self.timeline = timeline
        self.name = name
        self.alive = True
        self.frozen = False
        self.turns = 0
        self.kill_at: tuple[int, Callable[[], None]] | None = None
        """A number of callbacks and a function. The function is called instead of the callback with this number."""
        self.random = random.Random(f"process {seed}")
        self.loop: Any = VirtualLoop(self)
        self.threads: list[VirtualThreads] = []
        self._orphans: set[Task[Any]] = set()
        self._backlog: list[tuple[Act, tuple[Any, ...]]] = []
        self._takes_s = takes_s
        self._stutters = stutters
        self._looked_at = 0.0

    def world(self) -> World:
        """Clock, randomness and threads for the product."""
        return World(self.clock, self.clock, self.random, self._make_threads)

    def clock(self) -> float:
        now = max(self.timeline.now, self._looked_at)
        if self._stutters and self.random.random() < self._stutters:
            now += STUTTER_S
        self._looked_at = now
        return now

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> Task[Any]:
        task: Task[Any] = self.loop.create_task(work, name=name)
        return task

    def do(self, act: Act, args: tuple[Any, ...]) -> None:
        """Run an event in this process: a message, a timer, or the result of a thread."""
        if self.frozen:
            self._backlog.append((act, args))
        elif self.alive:
            self.turns += 1
            if self.kill_at is not None and self.turns >= self.kill_at[0]:
                _, kill = self.kill_at
                self.kill_at = None
                kill()
                return
            _set_running_loop(self.loop)
            try:
                act(*args)
            except BaseException as error:
                self.timeline.fail(error)
            finally:
                _set_running_loop(None)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for act, args in backlog:
            self.timeline.soon(self, act, *args)

    def kill(self) -> None:
        """Like SIGKILL: nothing in this process runs any more, not even its cleanup."""
        self.alive = self.frozen = False
        self._backlog.clear()
        # Keep references: a task runs its `finally` blocks when nobody holds a reference to it.
        self._orphans = {task for task in self.loop.tasks if not task.done()}

    def bury(self) -> None:
        """The schedule is over: drop the remaining work silently."""
        for task in self._orphans:
            with contextlib.suppress(BaseException):  # its `finally` blocks run here, and may fail
                task.get_coro().close()
        self._orphans.clear()

    def _make_threads(self, count: int, name: str) -> Executor:
        threads = VirtualThreads(self, count, name, self._takes_s(name))
        self.threads.append(threads)
        return threads


class VirtualTask(Task[T]):
    """A task whose hash is its number. Otherwise the order of a set of tasks would depend on memory addresses."""

    def __init__(self, coro: Any, *, number: int, loop: Any, name: str | None) -> None:
        self._number = number
        super().__init__(coro, loop=loop, name=name)

    def __hash__(self) -> int:
        return self._number


class VirtualThreads(Executor):
    """Threads of one process. A job takes a random time, and does all its work at one moment within that time."""

    def __init__(self, process: SimulatedProcess, count: int, name: str, takes_s: float) -> None:
        self.name = name
        self.under_way: list[Callable[[], Any]] = []
        """Jobs that have started and have not done their work yet."""
        self._process = process
        self._free = count
        self._takes_s = takes_s
        self._waiting: deque[tuple[Callable[[], Any], ThreadFuture[Any]]] = deque()
        self._is_shut = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> ThreadFuture[T]:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: ThreadFuture[T] = ThreadFuture()
        self._waiting.append((lambda: fn(*args, **kwargs), future))
        self._begin()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut = True
        if cancel_futures:
            for _, future in self._waiting:
                future.cancel()
            self._waiting.clear()

    def _begin(self) -> None:
        timeline, drawn = self._process.timeline, self._process.random
        while self._free and self._waiting:
            job, future = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            self._free -= 1
            self.under_way.append(job)
            works_at = timeline.now + self._takes_s * drawn.random()
            timeline.at(works_at, self._work, job, future, process=self._process)

    def _work(self, job: Callable[[], Any], future: ThreadFuture[Any]) -> None:
        self.under_way.remove(job)
        try:
            end = partial(future.set_result, job())
        except Exception as error:
            end = partial(future.set_exception, error)
        timeline = self._process.timeline
        ends_at = timeline.now + self._takes_s * self._process.random.random()
        timeline.at(ends_at, self._end, end, process=self._process)

    def _end(self, end: Callable[[], None]) -> None:
        self._free += 1
        end()
        self._begin()


class VirtualLoop:
    """asyncio in virtual time for one process: the parts of an event loop that the product uses."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._timeline = process.timeline
        self.get_debug = bool  # returns False without a Python frame: it is called for every handle
        self.tasks: WeakSet[Task[Any]] = WeakSet()
        """Tasks of this process. asyncio.all_tasks would search the tasks of all schedules so far."""
        self._as_loop: Any = self
        self._tasks_made = 0

    def time(self) -> float:
        return self._timeline.now

    def call_soon(self, callback: Act, *args: Any, context: Context | None = None) -> Handle:
        handle = Handle(callback, args, self._as_loop, context)
        self._timeline.soon(self._process, _run, handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Act, *args: Any, context: Context | None = None) -> TimerHandle:
        return self.call_at(self._timeline.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Act, *args: Any, context: Context | None = None) -> TimerHandle:
        handle = TimerHandle(when, callback, args, self._as_loop, context)
        self._timeline.at(max(when, self._timeline.now), _ring, handle, self._process)
        return handle

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        """Do nothing: the handle stays in the queue, and is skipped there."""

    def create_future(self) -> Future[Any]:
        return Future(loop=self._as_loop)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> Task[Any]:
        self._tasks_made += 1
        task: Task[Any] = VirtualTask(coro, number=self._tasks_made, loop=self._as_loop, name=name)
        self.tasks.add(task)
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> Future[T]:
        assert executor is not None
        return asyncio.wrap_future(executor.submit(func, *args), loop=self._as_loop)

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Fail the schedule: an uncaught error is a bug in the product, or a violation."""
        error = context.get("exception")
        if error is not None and self._process.alive:
            self._timeline.fail(error)


def _ring(handle: TimerHandle, process: SimulatedProcess) -> None:
    """Run a timer, unless it was cancelled, as most timers are."""
    if not handle._cancelled:
        process.do(_run, (handle,))


def _run(handle: Handle) -> None:
    if not handle._cancelled:
        handle._run()
