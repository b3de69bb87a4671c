"""Who waits for whom at a shard: messages that are read a few at a time, and bytes that wait for room."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from diloco_common.errors import Busy
from diloco_server.shell import waits
from diloco_server.shell.waits import Bodies, Outgoing, Unread
from waiting import DEADLINE_S, until_async


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Reader:
    def __init__(self, bodies: Bodies) -> None:
        self.is_read = False
        self.came = asyncio.Event()
        self.task = asyncio.create_task(self._read(bodies))

    async def _read(self, bodies: Bodies) -> None:
        async with bodies.place() as wait:
            self.is_read = True
            deadline = asyncio.get_running_loop().time() + DEADLINE_S
            await wait.until(deadline, Busy("late"), self.came.wait)


async def test_few_messages_are_read_at_once_and_the_newest_caller_is_next() -> None:
    bodies = Bodies()
    callers = [Reader(bodies) for _ in range(waits.BODIES_AT_ONCE + 3)]
    await turns()
    assert [c.is_read for c in callers] == [True] * waits.BODIES_AT_ONCE + [False] * 3
    callers[0].came.set()
    await turns()
    assert [c.is_read for c in callers[-3:]] == [False, False, True]
    for caller in callers:
        caller.came.set()
    await asyncio.gather(*(c.task for c in callers))
    after = Reader(bodies)
    await turns()
    assert after.is_read, "all places came back"
    after.task.cancel()


async def test_who_sends_for_long_makes_room_only_where_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "BODY_SURE_S", 0.0)
    bodies = Bodies()
    slow = [Reader(bodies) for _ in range(waits.BODIES_AT_ONCE)]
    await turns()
    assert not any(c.task.done() for c in slow)
    newcomer = Reader(bodies)
    with pytest.raises(Busy, match="others wait"):
        await slow[0].task
    await turns()
    assert newcomer.is_read
    assert not any(c.task.done() for c in slow[1:])
    for caller in (*slow[1:], newcomer):
        caller.task.cancel()


async def test_with_too_many_waiting_the_one_that_waits_for_longest_is_told_to_come_again(monkeypatch) -> None:
    monkeypatch.setattr(waits, "BODIES_WAITING_MAX", 2)
    bodies = Bodies()
    callers = [Reader(bodies) for _ in range(waits.BODIES_AT_ONCE + 3)]
    await turns()
    with pytest.raises(Busy, match="too many callers join at once"):
        await callers[waits.BODIES_AT_ONCE].task
    assert sum(c.task.done() for c in callers) == 1
    for caller in callers:
        caller.task.cancel()


async def test_a_caller_that_hangs_up_gives_its_place_back() -> None:
    bodies = Bodies()
    for _ in range(3):
        callers = [Reader(bodies) for _ in range(waits.BODIES_AT_ONCE + 2)]
        await turns()
        for caller in callers:
            caller.task.cancel()
        await turns()
    last = Reader(bodies)
    await turns()
    assert last.is_read
    last.task.cancel()


async def test_bytes_wait_in_line_until_they_fit() -> None:
    outgoing, log = Outgoing(100), list[str]()

    async def send(name: str, num_bytes: int, until: asyncio.Event) -> None:
        async with outgoing.held(num_bytes):
            log.append(name)
            await until.wait()

    taken = [asyncio.Event() for _ in range(4)]
    sizes = (60, 60, 30, 500)
    tasks = [asyncio.create_task(send("abcd"[i], size, taken[i])) for i, size in enumerate(sizes)]
    await turns()
    assert (log, outgoing.num_bytes) == (["a"], 60), "c would fit, but b was there before"
    taken[0].set()
    await turns()
    assert (log, outgoing.num_bytes) == (["a", "b", "c"], 90)
    tasks[1].cancel()
    taken[2].set()
    await turns()
    assert (log, outgoing.num_bytes) == (["a", "b", "c", "d"], 500), "more than all, but alone"
    tasks[3].cancel()
    await turns()
    assert outgoing.num_bytes == 0


class Version(list[bytes]):
    """Its chunks, and what a weak reference may be to."""


async def test_who_pauses_for_long_no_longer_keeps_a_version_in_memory() -> None:
    version = Version([b"1", b"2", b"3"])
    held, unread = weakref.ref(version), Unread(version, 0.0)
    del version
    assert unread.next(1 << 30) == b"1"  # these take a slow link for hours
    assert unread.next(0) == b"2"
    await until_async(lambda: held() is None, "the pause to be too long")
    with pytest.raises(Busy, match="not taken in time"):
        unread.next(0)
