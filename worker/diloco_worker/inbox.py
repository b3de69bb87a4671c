"""What the network thread hands to the training thread, in order."""

from __future__ import annotations

import threading

from diloco_worker.core.events import Event, EventQueue


class Inbox:
    """An event queue with one reader, the training thread, and one writer, the network thread."""

    def __init__(self) -> None:
        self._events = EventQueue()
        self._some = threading.Condition()

    def put(self, event: Event) -> None:
        with self._some:
            self._events.put(event)
            self._some.notify()

    def take(self) -> list[Event]:
        """Everything that came, oldest first. Never waits."""
        with self._some:
            return self._events.take()

    def wait(self, timeout_s: float) -> None:
        """Wait until something is there, or the time is over."""
        with self._some:
            self._some.wait_for(lambda: len(self._events) > 0, timeout_s)
