"""HTTP connections with a bound and a deadline, under uvicorn: it has neither.

At most `CONNECTIONS_MAX` are open. A newcomer pushes out the oldest that has no request under way, so idle connections
keep nobody out: not the one that asks whether this process is healthy.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Protocol

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX = 128
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
        self.idle: dict[Guest, None] = {}
        """Without a complete header."""
        self.busy: set[Guest] = set()

    def make_room(self) -> bool:
        """Whether there is room for one more; closes the oldest idle one if need be."""
        if len(self.idle) + len(self.busy) < CONNECTIONS_MAX:
            return True
        if not self.idle:
            return False
        oldest = next(iter(self.idle))
        self.gone(oldest)
        oldest.transport.abort()
        return True

    def gone(self, connection: Guest) -> None:
        self.idle.pop(connection, None)
        self.busy.discard(connection)

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
        if not self._among.make_room():
            self.transport = transport  # which `connection_lost` looks at
            transport.abort()
            return
        self.app_state = {"certificate": certificate_of(transport)}  # part of every scope
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        was_busy = self._is_busy
        super().data_received(data)
        if was_busy != self._is_busy:
            self._look()

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
        self._among.gone(self)
        is_busy = self._is_busy or self.transport.is_closing()  # what is left to be sent has a deadline, too
        if is_busy:
            self._among.busy.add(self)
        else:
            self._among.idle[self] = None
        self._deadline = self.loop.call_later(ANSWER_S if is_busy else HEADER_S, self.transport.abort)
