"""How tests wait for what other threads and processes do: until it is there, and never for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

DEADLINE_S = 120.0
"""What takes longer than this hangs, also on a machine that gives a process no core for ten seconds."""
LOOK_EVERY_S = 0.005

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, seconds: float = DEADLINE_S, every_s: float = LOOK_EVERY_S) -> T:
    """The value of the condition once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(every_s)
    return value


async def until_async(condition: Callable[[], T], what: str, seconds: float = DEADLINE_S) -> T:
    """The same in an event loop, which goes on meanwhile."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        await asyncio.sleep(LOOK_EVERY_S)
    return value
