"""HTTP connections with a bound and a deadline, under uvicorn: it has neither.

At most `CONNECTIONS_MAX` are open. A newcomer pushes out whoever has not read its answer for longest, else the oldest
that has no request under way. So neither keeps anybody out. Where all are answered, and read, `HEALTH_MAX` more are let
in, and are asked for health alone (`Connections.is_crowded`). Where those are taken too, the oldest has to go: of the
silent ones, or of the busy ones if they hold more than `CONNECTIONS_MAX` places. So a crowd of one kind never pushes
out one of the other.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any, Protocol

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX = 128
HEALTH_MAX = 64
"""Places beyond that, for whoever asks whether this process is healthy."""
SPEAKS_S = 0.5
"""Whoever has something to ask says so within this time. As long as that nobody is pushed out for being idle, where one
of those places is left."""
HEALTH_PATHS = ("/healthz", "/readyz")
HEADER_S = 5.0
"""Seconds for a complete header, from the connect or from the answer before."""
ANSWER_S = 30.0
"""Seconds for the rest of a request, until its answer is sent."""


def certificate_of(transport: asyncio.BaseTransport) -> bytes | None:
    """What the caller has shown, in PEM; None if nothing, or without TLS."""
    shown = transport.get_extra_info("ssl_object")
    der = None if shown is None else shown.getpeercert(binary_form=True)
    return None if der is None else ssl.DER_cert_to_PEM_cert(der).encode()


class Guest(Protocol):
    """A connection, or what is to become one."""

    transport: asyncio.Transport


class Connections:
    """The open connections of one server; oldest first."""

    def __init__(self) -> None:
        self.idle: dict[Guest, float] = {}
        """Without a complete header; since when, oldest first."""
        self.busy: dict[Guest, None] = {}
        """With a request that is not answered yet."""
        self.stuck: dict[Guest, None] = {}
        """Those of both that do not read what is sent to them; since when, oldest first."""

    def __len__(self) -> int:
        return len(self.idle) + len(self.busy)

    @property
    def is_crowded(self) -> bool:
        """Whether only health is answered."""
        return len(self) > CONNECTIONS_MAX

    def make_room(self) -> None:
        """For one more; closes another one if need be."""
        if len(self) < CONNECTIONS_MAX:
            return
        found, idle = next(iter(self.stuck), None), next(iter(self.idle), None)
        if found is None and idle is not None and time.monotonic() - self.idle[idle] > SPEAKS_S:
            found = idle
        if found is None and len(self) >= CONNECTIONS_MAX + HEALTH_MAX:
            found = idle if len(self.idle) > HEALTH_MAX else next(iter(self.busy), idle)
        if found is not None:
            self.gone(found)
            found.transport.abort()

    def gone(self, connection: Guest) -> None:
        for some in (self.idle, self.busy, self.stuck):
            some.pop(connection, None)

    def is_idle(self, connection: Guest) -> None:
        """It waits for a header, or for a handshake."""
        self.busy.pop(connection, None)
        self.idle[connection] = time.monotonic()

    def is_busy(self, connection: Guest) -> None:
        """Its request has come. Those that were busy before, and since then, keep their places."""
        self.idle.pop(connection, None)
        self.busy[connection] = None

    def end_idle(self) -> None:
        for connection in self.idle:
            connection.transport.abort()


class Connection(H11Protocol):
    """One connection."""

    def __init__(self, among: Connections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._among = among
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._among.make_room()
        self.app_state = {"certificate": certificate_of(transport)}  # part of every scope
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        was_busy = self._is_busy
        super().data_received(data)
        if was_busy != self._is_busy:
            self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._among.stuck[self] = None

    def resume_writing(self) -> None:
        self._among.stuck.pop(self, None)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. That is the answer, also to a request whose body is wrong."""
        super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True  # or the answer to its header would be sent as well

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._among.gone(self)
        super().connection_lost(exc)

    @property
    def _is_busy(self) -> bool:
        """Whether a whole header has come that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self) -> None:
        """A new wait begins: for a header, or for the end of an answer."""
        if self._deadline is not None:
            self._deadline.cancel()
        is_busy = self._is_busy or self.transport.is_closing()  # what is left to be sent has a deadline, too
        if is_busy:
            self._among.is_busy(self)
        else:
            self._among.is_idle(self)
        self._deadline = self.loop.call_later(ANSWER_S if is_busy else HEADER_S, self.transport.abort)
