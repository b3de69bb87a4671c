"""Passes events from the network thread to the training thread, in order."""

from __future__ import annotations

import threading

from diloco_worker.core.events import Event, EventQueue


class Inbox:
    """An event queue with one reader, the training thread, and one writer, the network thread."""

    def __init__(self) -> None:
        self._events = EventQueue()
        self._changed = threading.Condition()
        self._has_new = False  # whether the queue holds an event that was not put back

    def put(self, event: Event) -> None:
        with self._changed:
            self._events.put(event)
            self._has_new = True
            self._changed.notify()

    def pop(self) -> Event | None:
        """The oldest event; None: there is none. Never waits."""
        with self._changed:
            event = self._events.pop()
            self._has_new = len(self._events) > 0
            return event

    def put_back(self, event: Event) -> None:
        """The reader cannot use the event yet. It will be popped next, unless a newer one of its kind has come."""
        with self._changed:
            self._events.put_back(event)
            self._has_new = False

    def unread(self) -> list[Event]:
        """What waits in it, the oldest first. It stays there."""
        with self._changed:
            return list(self._events)

    def wait(self, timeout_s: float) -> None:
        """Wait until there is an event that was not put back, or until the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_new, timeout_s)
