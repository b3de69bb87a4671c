"""Threads that write to a data folder, and know whether one still does: nothing can call back a write that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class Writers:
    """Work is given by one event loop, which owns this."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._under_way: set[Future[Any]] = set()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future = self._threads.submit(work)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def close(self) -> None:
        """Begin nothing more, and wait for nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ended(self, timeout_s: float) -> bool:
        """After `close`: wait until no thread writes. False if one still does after `timeout_s` seconds."""
        waits = [asyncio.wrap_future(future) for future in self._under_way.copy()]
        if not waits:
            return True
        done, pending = await asyncio.wait(waits, timeout=timeout_s)
        for wait in done:
            if not wait.cancelled():
                wait.exception()  # told to whoever gave the work
        for wait in pending:
            wait.cancel()  # the write goes on
        return not pending
