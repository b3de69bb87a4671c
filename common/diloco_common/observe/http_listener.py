"""Serves an ASGI application by uvicorn, as a guest in the caller's event loop: in plaintext, or over TLS.

`http_connections.py` bounds the connections. uvicorn sees those whose handshake is done; until then they are counted,
and bounded in time, as those that have not sent a header yet. Nobody has to show a certificate: probes ask for health
without one. Whoever shows one that the run's CA has not signed does not get in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeAlias, cast

import uvicorn

from diloco_common import forks
from diloco_common.errors import WrongIdentity
from diloco_common.observe.http_connections import HEADER_S, HEALTH_PATHS, Connection, Connections
from diloco_common.trust.identity import Proof, Scope
from diloco_common.trust.tls import TlsFiles, proof_of
from diloco_common.wire.addresses import bind_socket, bound_address

LOOKERS = (Scope.OBSERVER, Scope.ADMIN)
"""Scopes that may see metrics and the status of every process of their run."""


class TlsDoor:
    """Takes connections in over TLS. Certificates are exchanged from one handshake to the next."""

    def __init__(self, files: Callable[[], TlsFiles], may_look: Callable[[Proof], bool] = lambda _: True) -> None:
        """`files`: the newest ones, with a pair; the same object as before if nothing changed.

        `may_look`: what else is asked of whoever shows a certificate, such as that it is not revoked.
        """
        self._files, self._may_look = files, may_look
        self._served = files()
        self._context = _context(self._served)

    def context(self) -> ssl.SSLContext:
        """For the next handshake."""
        newest = self._files()
        if newest is not self._served:
            self._context, self._served = _context(newest), newest
        return self._context

    def admits(self, certificate: bytes | None) -> bool:
        """Whether a caller sees metrics and status: an observer or admin of this run, or this process itself.

        `certificate`: in PEM; None if it showed none. TLS has checked its chain.
        """
        itself = self._served.subject
        if certificate is None or itself is None:
            return False
        try:
            proof = proof_of(certificate)
        except WrongIdentity:
            return False
        subject = proof.subject
        is_welcome = subject == itself or (subject.run_id == itself.run_id and subject.scope in LOOKERS)
        return is_welcome and self._may_look(proof)


class Arrival(asyncio.Protocol):
    """A connection until its handshake is done; then a `Connection` takes over."""

    def __init__(self, door: TlsDoor, among: Connections, connect: Callable[[], Connection]) -> None:
        self._door, self._among, self._connect = door, among, connect
        self._early: list[bytes] = []  # a request may come in one packet with the end of the handshake
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._among.make_room()
        self._among.is_idle(self)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(), name="http handshake")

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    async def _shake_hands(self) -> None:
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                self.transport, self, self._door.context(), server_side=True, ssl_handshake_timeout=HEADER_S
            )
        except OSError:  # gone, too slow, or not somebody whom we talk to; none of that is news
            self.transport.abort()
            return
        finally:
            self._among.gone(self)
        if encrypted is None:
            return
        connection = self._connect()
        encrypted.set_protocol(connection)
        connection.connection_made(encrypted)
        for data in self._early:
            connection.data_received(data)


def _context(files: TlsFiles) -> ssl.SSLContext:
    assert files.pair is not None, "who serves has a certificate"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=files.ca.decode())
    # Python takes a pair from a file alone. What was read and found to fit is what counts, not what lies there by now.
    memory = os.memfd_create("pair")
    try:
        os.write(memory, b"\n".join(files.pair))
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


CROWDED = b"too many connections are open; try again\n"
Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
"""ASGI 3. Every scope has state["certificate"]: what the caller has shown, in PEM, or None."""
_ACCEPTED_AT_ONCE = 16
"""Connections that one turn of the event loop accepts. Until it ends, none of them is closed: each takes a file. What
they say is read three turns later, so those that come meanwhile must not push them out (`HEALTH_MAX`)."""
_WAITING_MAX = 1024
"""Connections that wait to be accepted. A crowd beyond that delays whoever comes then by a second."""


class HttpListener:
    """One address and the application that answers there."""

    def __init__(self, address: str, application: Application, door: TlsDoor | None = None) -> None:
        """`door`: serve over TLS."""
        self._address = address
        self._application = application
        self._door = door
        self._connections = Connections()
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen, and return the bound "host:port". Raises ConfigError or InUse."""
        assert self._server is None, "started twice"
        sock = bind_socket(self._address)
        forks.close_in_children(sock)
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            http=cast(type[asyncio.Protocol], self._connection),
            backlog=_ACCEPTED_AT_ONCE,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]), name="http")
        up = asyncio.create_task(self._server.up.wait(), name="http-up")
        try:
            await asyncio.wait({up, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if self._task.done():
            await self._task  # raises the error, if there is one
            raise RuntimeError("the HTTP server ended while starting")
        sock.listen(_WAITING_MAX)  # asyncio has one number for both
        return str(bound_address(sock))

    async def stop(self) -> None:
        """Close the socket. Answers in progress get one second to end. Repeating it is fine."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        self._connections.end_idle()
        await self._task
        self._server = self._task = None

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """The application's answer; that there is no room, if all places are taken and this is not about health."""
        if self._connections.is_crowded and scope["path"] not in HEALTH_PATHS:
            headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(CROWDED))]
            headers += [(b"connection", b"close"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": CROWDED})
            return
        await self._application(scope, receive, send if not self._connections.is_crowded else _closing(send))

    def _connection(self, **of_uvicorn: Any) -> asyncio.Protocol:
        connect = partial(Connection, self._connections, **of_uvicorn)
        return connect() if self._door is None else Arrival(self._door, self._connections, connect)


def _closing(send: Any) -> Any:
    """An answer after which the connection ends."""

    async def send_and_close(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return send_and_close


class _Server(uvicorn.Server):
    """uvicorn as a guest: it leaves signals to the process around it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()
