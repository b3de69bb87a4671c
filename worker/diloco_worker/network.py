"""The network thread of a learner: one event loop that runs a link per shard, and the HTTP server.

The loop is woken through a socket. Writing to it lets go of the interpreter lock, and whoever does so gets it back once
the network thread, just woken, has done its work: up to 5 ms. So a thread of its own does the waking, not the training
thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from diloco_common.http import HttpServer
from diloco_worker.link import ShardLink
from diloco_worker.session import LinkContext

SETTLE_S = 5.0
"""Seconds that pushes under way have to be answered when the learner ends."""
STOP_S = 15.0

T = TypeVar("T")


class Network:
    """Started once, stopped once. Its methods may be called from any thread."""

    def __init__(self, addresses: Sequence[str], context: LinkContext, http: HttpServer | None) -> None:
        self.links = [ShardLink(address, context) for address in addresses]
        self._transfer = context.transfer
        self._http = http
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="diloco-network", daemon=True)
        self._acts: SimpleQueue[tuple[Callable[[], None], ...]] = SimpleQueue()  # its `put` keeps the interpreter lock
        self._waker = threading.Thread(target=self._wake, name="diloco-waker", daemon=True)
        self._stopping = False
        self._linking: list[asyncio.Task[None]] = []

    def start(self) -> str:
        """Start dialing; returns the address of the HTTP server, if there is one. Raises ConfigError or InUse."""
        self._thread.start()
        self._waker.start()
        return self._wait_for(self._start)

    def soon(self, *acts: Callable[[], None]) -> None:
        """Do something in the network thread, in the order of the calls. Never waits."""
        if acts and not self._stopping:
            self._acts.put(acts)

    def link_to(self, shard_index: int) -> ShardLink:
        """The link to a shard that was joined."""
        return next(link for link in self.links if link.session.shard_index == shard_index)

    def stop(self) -> None:
        """Let pushes settle, say goodbye, end the thread."""
        if self._stopping or not self._thread.is_alive():
            return
        self._stopping = True
        self._acts.put(())
        self._waker.join(STOP_S)
        try:
            self._wait_for(self._stop)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
            self._transfer.close()

    def _wake(self) -> None:
        while acts := self._acts.get():
            for act in acts:
                self._loop.call_soon_threadsafe(act)
            del acts, act  # what they hold is freed once they are done, not with the next ones

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _start(self) -> str:
        address = await self._http.start() if self._http is not None else ""
        self._linking = [asyncio.create_task(link.run(), name=f"link {link.address}") for link in self.links]
        return address

    async def _stop(self) -> None:
        await asyncio.gather(*(link.settle(SETTLE_S) for link in self.links))
        await asyncio.gather(*(link.leave() for link in self.links))
        for task in self._linking:
            task.cancel()
        await asyncio.gather(*self._linking, return_exceptions=True)
        if self._http is not None:
            await self._http.stop()

    def _wait_for(self, act: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await act()

        future: Future[T] = asyncio.run_coroutine_threadsafe(run(), self._loop)
        return future.result(SETTLE_S + STOP_S)
