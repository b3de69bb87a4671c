"""Virtual time: everything that happens in a schedule, in order of (time, order of asking).

Nothing here depends on the machine, so the same seed gives the same schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_simulator.process import Process

Act = Callable[..., Any]


class Timeline:
    """The clock, and what is still to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Acts so far."""
        self._later: list[tuple[float, int, Process | None, Act, tuple[Any, ...]]] = []
        self._soon: deque[tuple[Process | None, Act, tuple[Any, ...]]] = deque()
        self._asked = 0
        self._stopped = False
        self._error: BaseException | None = None

    def at(self, time_s: float, act: Act, *args: Any, process: Process | None = None) -> None:
        """Call `act` at a time to come, in `process` if one is named."""
        self._asked += 1
        heappush(self._later, (time_s, self._asked, process, act, args))

    def later(self, delay_s: float, act: Act, *args: Any) -> None:
        """Call `act` in `delay_s` seconds."""
        self.at(self.now + delay_s, act, *args)

    def soon(self, process: Process | None, act: Act, *args: Any) -> None:
        """Call `act` now, after what was asked for now before."""
        self._soon.append((process, act, args))

    def run(self) -> None:
        """Let one thing after the other happen, each with all that follows from it at once, until `stop`.

        Raises what `fail` was given.
        """
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
        """End the schedule with this error, which came where nobody could raise it."""
        self._error = self._error or error
