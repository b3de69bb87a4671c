"""What the network thread hands to the training thread, in order."""

from __future__ import annotations

import threading

from diloco_worker.core.events import Event, EventQueue


class Inbox:
    """An event queue with one reader, the training thread, and one writer, the network thread."""

    def __init__(self) -> None:
        self._events = EventQueue()
        self._some = threading.Condition()
        self._news = False  # whether something was put since the last of it was popped, or put back

    def put(self, event: Event) -> None:
        with self._some:
            self._events.put(event)
            self._news = True
            self._some.notify()

    def pop(self) -> Event | None:
        """The oldest event that waits; None: there is none. Never waits."""
        with self._some:
            event = self._events.pop()
            self._news = len(self._events) > 0
            return event

    def put_back(self, event: Event) -> None:
        """The reader cannot use it yet: it is the next to be popped, unless a newer one of its kind has come."""
        with self._some:
            self._events.put_back(event)
            self._news = False

    def wait(self, timeout_s: float) -> None:
        """Wait until something is there that was not put back, or the time is over."""
        with self._some:
            self._some.wait_for(lambda: self._news, timeout_s)
