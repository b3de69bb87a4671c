"""Waits for callers, either for their bytes or until they take ours. Another call can end such a wait.

A caller slower than `SLOWEST_BYTES_PER_S` is dropped; a caller that blocks others is told to try again.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from diloco_common.errors import Busy, Refusal, TornUpload
from diloco_common.wire.calls import CALL_S, SETTLE_S, SLOWEST_BYTES_PER_S
from diloco_server.shell.quotas import Bytes

BODIES_AT_ONCE = 4
"""Maximum number of messages of callers without a lease that are read at once. Their sizes are not known yet."""
BODIES_WAITING_MAX = 256
"""Maximum number of calls that wait for a place. Each may have sent 64 KiB before it is read (`rpc.SERVER_OPTIONS`)."""
BODY_S = CALL_S - SETTLE_S
"""Seconds for a message of a caller without a lease. So the answer arrives before the caller gives up."""
BODY_SURE_S = 1.0
"""Seconds that a message may take even if others wait."""

T = TypeVar("T")


class Wait:
    """A wait of one call, which another call can end."""

    def __init__(self) -> None:
        self._why: Refusal | None = None
        self._timeout: asyncio.Timeout | None = None

    def end(self, why: Refusal) -> None:
        """End the wait now, or when it begins. Calls after the first only change the reason."""
        self._why = why
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def until(self, deadline: float, late: Refusal, what: Callable[[], Awaitable[T]]) -> T:
        """The result of `what`, awaited until `deadline`, a time of the event loop. Raises `late`, or the reason given
        to `end`.

        `what` is called only if there is a wait, because a coroutine that is never awaited causes a warning.
        """
        if self._why is not None:
            raise self._why
        try:
            async with asyncio.timeout_at(deadline) as self._timeout:
                return await what()
        except TimeoutError:
            raise (self._why or late) from None
        finally:
            self._timeout = None


class Deadlines:
    """Deadlines for the bytes of a push. A push may pause, but must not be too slow for long."""

    def __init__(self, pause_s: float, share: int) -> None:
        """`share`: the number of pushes that share one link."""
        self._began = asyncio.get_running_loop().time()
        self._pause_s, self._share = pause_s, share
        self._bytes = 0

    def due(self, num_bytes: int) -> float:
        """When the next `num_bytes` must have arrived: a time of the event loop."""
        self._bytes += num_bytes
        return self._began + self._pause_s + self._share * self._bytes / SLOWEST_BYTES_PER_S


class Turns:
    """A rate limit that waits: `burst` turns at once, `per_s` in the long run."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._every_s, self._slack_s = 1 / per_s, burst / per_s
        self._due = -math.inf  # not 0: a machine's clock may have just started

    async def next(self) -> None:
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now - self._slack_s) + self._every_s
        if self._due > now:
            await asyncio.sleep(self._due - now)


class OpenPush(Wait):
    def __init__(self, account: str, learner_id: str) -> None:
        super().__init__()
        self.account = account
        self.learner_id = learner_id

    async def next(self, parts: AsyncIterator[T], due: float) -> T | None:
        """The next part; None at the end. Raises TornUpload if it is late or a newer push replaced this one."""
        late = TornUpload("the bytes of this push arrived too slowly, or not at all; push again")
        return await self.until(due, late, lambda: anext(parts, None))


class Bodies:
    """Lets only a few messages be read at once, newest first.

    If others wait, the message that has taken longest makes room after a second. So a caller that never finishes its
    message blocks others only briefly, and a crowd of them does not block newcomers.
    """

    def __init__(self) -> None:
        self._reading: dict[Wait, float] = {}  # when reading began; oldest first
        self._free = BODIES_AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._room: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Wait]:
        """Hold this while a message is read. Raises Busy."""
        await self._take()
        wait = Wait()
        self._reading[wait] = asyncio.get_running_loop().time()
        try:
            yield wait
        finally:
            del self._reading[wait]
            self._give_back()

    async def _take(self) -> None:
        if self._free:
            self._free -= 1
            return
        if len(self._waiting) >= BODIES_WAITING_MAX:
            self._waiting.popleft().set_exception(_crowded())
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        self._make_room()
        try:
            async with asyncio.timeout(BODY_S):
                await mine
        except (TimeoutError, asyncio.CancelledError) as ended:
            if mine.done() and not mine.cancelled():  # the place came at the same moment
                self._give_back()
            if isinstance(ended, TimeoutError):
                raise _crowded() from None
            raise
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)

    def _give_back(self) -> None:
        while self._waiting:
            newest = self._waiting.pop()
            if not newest.done():
                newest.set_result(None)
                return
        self._free += 1

    def _make_room(self) -> None:
        """End messages that have taken too long while others wait."""
        if self._room is not None:
            self._room.cancel()
            self._room = None
        if not self._waiting or not self._reading:
            return
        loop = asyncio.get_running_loop()
        for (wait, since), _ in zip(self._reading.items(), self._waiting, strict=False):
            if loop.time() < since + BODY_SURE_S:
                self._room = loop.call_at(since + BODY_SURE_S, self._make_room)
                return
            wait.end(Busy("others wait, and this message did not arrive in time; try again"))
        self._room = loop.call_later(BODY_SURE_S, self._make_room)


def _crowded() -> Busy:
    return Busy("too many callers join at once; try again in a moment")


class Unread(Generic[T]):
    """The chunks that a pull has not taken. They keep a version in memory, so a caller that pauses long loses them."""

    def __init__(self, chunks: Iterable[T], pause_s: float) -> None:
        """`pause_s`: the longest pause, in addition to the time that a slow link needs for a chunk."""
        self._chunks: Iterator[T] | None = iter(chunks)
        self._pause_s = pause_s
        self._ends: asyncio.TimerHandle | None = None

    def next(self, num_bytes: int) -> T:
        """The next chunk, which has `num_bytes`. Raises Busy."""
        if self._chunks is None:
            raise Busy("the bytes of this version were not taken in time; pull again")
        self._wait(self._pause_s + num_bytes / SLOWEST_BYTES_PER_S)
        return next(self._chunks)

    def taken(self) -> None:
        """The transport has taken the chunk: now the caller waits for the shard."""
        self._wait(None)

    def close(self) -> None:
        self._chunks = None
        self._wait(None)

    def _wait(self, seconds: float | None) -> None:
        if self._ends is not None:
            self._ends.cancel()
        self._ends = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.close)


class Outgoing:
    """Bytes given to the transport that callers have not taken yet. Chunks that do not fit wait in line."""

    def __init__(self, bytes_most: int) -> None:
        self._bytes = Bytes("bytes that pulls have not taken", bytes_most)
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_bytes(self) -> int:
        return self._bytes.held

    @asynccontextmanager
    async def held(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold this while the transport has the bytes. It waits until they fit."""
        if self._line or not self._bytes.fits(num_bytes):
            await self._turn(num_bytes)
        else:
            self._bytes.take(num_bytes)
        try:
            yield
        finally:
            self._give_back(num_bytes)

    async def _turn(self, num_bytes: int) -> None:
        """Wait in line. When this returns, `_serve` has taken the bytes."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(num_bytes)
            raise

    def _give_back(self, num_bytes: int) -> None:
        self._bytes.give_back(num_bytes)
        self._serve()

    def _serve(self) -> None:
        while self._line and (self._line[0][1].done() or self._bytes.fits(self._line[0][0])):
            num_bytes, turn = self._line.popleft()
            if not turn.done():
                self._bytes.take(num_bytes)
                turn.set_result(None)
