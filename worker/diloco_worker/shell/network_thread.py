"""The network thread of a learner: one event loop for its connections and the HTTP server.

The loop is woken through a socket. Writing to it releases the interpreter lock, and the writer gets the lock back only
after the network thread has done its work, up to 5 ms later. So a separate thread does the waking, not the training
thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

from diloco_common.observe.http import HttpServer
from diloco_common.wire.calls import SETTLE_S
from diloco_worker.core.events import Act
from diloco_worker.shell.connections import Connections

STOP_S = 4 * SETTLE_S

T = TypeVar("T")


class NetworkThread:
    """A `Background`. Started once, stopped once. Its methods may be called from any thread."""

    def __init__(self, make_http: Callable[[Connections], HttpServer] | None = None) -> None:
        self.http_address = ""
        self._make_http = make_http
        self._http: HttpServer | None = None
        self._thread = threading.Thread(target=self._run, name="diloco-network", daemon=True)
        self._posted: SimpleQueue[Sequence[Act]] = SimpleQueue()  # its `put` keeps the interpreter lock
        self._waker = threading.Thread(target=self._wake, name="diloco-waker", daemon=True)
        self._running: asyncio.Task[None] | None = None  # None: the connections never started
        self._is_stopping = False

    def start(self, connections: Connections) -> None:
        """Start dialing, and the HTTP server. Raises ConfigError or InUse."""
        self._connections = connections
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._waker.start()
        self._wait_for(self._start())

    def post(self, acts: Sequence[Act]) -> None:
        """Have the connections perform these acts, after earlier ones. Never waits."""
        if acts and not self._is_stopping:
            self._posted.put(acts)

    def stop(self, settle_s: float) -> None:
        if self._is_stopping or not self._thread.is_alive():
            return
        self._is_stopping = True
        self._posted.put(())
        self._waker.join(STOP_S)
        try:
            self._wait_for(self._stop(settle_s))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)

    def _wake(self) -> None:
        while acts := self._posted.get():
            self._loop.call_soon_threadsafe(self._connections.perform, acts)
            del acts  # free them as soon as they are done, not when the next ones arrive

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _start(self) -> None:
        if self._make_http is not None:
            self._http = self._make_http(self._connections)
            self.http_address = await self._http.start()
        self._running = asyncio.create_task(self._connections.run(), name="connections")

    async def _stop(self, settle_s: float) -> None:
        await self._connections.leave(settle_s)
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._http is not None:
            await self._http.stop()
        await _end_of_all_others()

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(STOP_S)


async def _end_of_all_others() -> None:
    """Wait until this is the only task.

    grpc.aio has a task for each call (`_AioCall._handle_status_once_received`) that nobody else knows. It ends when the
    call's status arrives, a moment after the call was cancelled. If the loop is closed before, asyncio prints "Task was
    destroyed but it is pending!".
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if not others:
        return
    _, late = await asyncio.wait(others, timeout=1.0)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
