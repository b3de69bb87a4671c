"""HTTP over TLS: the handshake before a connection, and who may look at what.

uvicorn sees connections whose handshake is done. Until then they are counted, and bounded in time, as those that have
not sent a header yet (`http_connections.py`). Nobody has to show a certificate: probes ask for health without one.
Whoever shows one that the run's CA has not signed does not get in.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from typing import cast

from diloco_common.errors import WrongIdentity
from diloco_common.observe.http_connections import HEADER_S, Connection, Connections
from diloco_common.trust.identity import Proof, Scope
from diloco_common.trust.tls import TlsFiles, proof_of

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
