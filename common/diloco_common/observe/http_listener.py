"""Serves an ASGI application with uvicorn in the caller's event loop, in plaintext or over TLS.

uvicorn limits how long connections are idle after their first answer, and nothing else; `docs/security.md` says what
remains open. Health shares the port. On a port of its own it answered no sooner under a flood of requests, and did not
answer when silent connections held all files of the process. Certificates are optional, since probes ask for health
without one. A certificate that the run's CA has not signed is refused.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from diloco_common import forks
from diloco_common.errors import WrongIdentity
from diloco_common.trust.files import TlsFiles, proof_of
from diloco_common.trust.identity import Proof, Scope
from diloco_common.wire.addresses import bind_socket, bound_address

BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted: the default of uvicorn."""
LOOKERS = (Scope.OBSERVER, Scope.ADMIN)
"""Scopes that may see metrics and status of every process of their run."""


class TlsDoor:
    """Decides who may connect over TLS, and who may see metrics. Its certificates may change between handshakes."""

    def __init__(self, files: Callable[[], TlsFiles], may_look: Callable[[Proof], bool] = lambda _: True) -> None:
        """`files` returns the newest files, with a pair; it is the same object as before if nothing changed.

        `may_look`: a further check of a certificate, for example that it is not revoked.
        """
        self._files, self._may_look = files, may_look
        self._served = files()
        self._context = _context(self._served)

    def context(self) -> ssl.SSLContext:
        """The context of a server. Each handshake uses the newest files."""
        context = _context(self._served)
        context.sni_callback = self._exchange  # OpenSSL calls it without a server name, too
        return context

    def _exchange(self, handshake: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        newest = self._files()
        if newest is not self._served:
            self._context, self._served = _context(newest), newest
        handshake.context = self._context

    def admits(self, certificate: bytes | None) -> bool:
        """Whether a caller may see metrics and status: an observer or admin of this run, or this process itself.

        `certificate`: in PEM, with its chain checked by TLS; None if there is none.
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


def _context(files: TlsFiles) -> ssl.SSLContext:
    assert files.pair is not None, "a server has a certificate"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=files.ca.decode())
    # Python loads a pair only from a file. Use the pair that was read and checked, not the one on disk now.
    memory = os.memfd_create("pair")
    try:
        os.write(memory, b"\n".join(files.pair))
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


class _HttpConnection(H11Protocol):
    """One connection, which passes the caller's certificate to its requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        shown = transport.get_extra_info("ssl_object")
        der = None if shown is None else shown.getpeercert(binary_form=True)
        self.app_state = {"certificate": None if der is None else ssl.DER_cert_to_PEM_cert(der).encode()}
        super().connection_made(transport)

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        if self.cycle is not None:  # only the body is wrong: otherwise the request would be answered twice
            self.cycle.disconnected = True


Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
"""ASGI 3. Every scope has state["certificate"]: the caller's certificate in PEM, or None."""


class HttpListener:
    def __init__(self, address: str, application: Application, door: TlsDoor | None = None) -> None:
        """`door`: serve over TLS."""
        self._address = address
        config = uvicorn.Config(
            application,
            interface="asgi3",
            http=_HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            backlog=1,  # asyncio accepts about this many at once, and without free files it retries each one
            ssl_context_factory=None if door is None else lambda *_: door.context(),
        )
        self._server = uvicorn.Server(config)
        self._sockets: list[socket.socket] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen, and return the bound "host:port". Raises ConfigError or InUse."""
        assert self._task is None, "started twice"
        sock = bind_socket(self._address)
        forks.close_in_children(sock)
        self._sockets = [sock]
        # Like `Server.serve`, without its signal handlers: signals belong to the surrounding process.
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=self._sockets)
        sock.listen(BACKLOG)
        self._task = asyncio.create_task(self._server.main_loop(), name="http")
        return str(bound_address(sock))

    async def stop(self) -> None:
        """Close the socket. Answers in progress get one second to finish. May be repeated."""
        if self._task is None:
            return
        self._server.should_exit = True
        await self._task
        await self._server.shutdown(sockets=self._sockets)
        self._task = None
