"""The way to a shard before the first call: its name, its port, TLS and certificates."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from diloco_common.errors import HandshakeFailed
from diloco_common.trust.tls import TlsFiles, shown
from diloco_common.wire.addresses import parse_address
from diloco_common.wire.handshake import certificate_at, find_cause
from diloco_deploy.doctor.checks import Finding, failure, of_error, ok, warning

DIAL_S = 3.0
DIALS = 3
FAR_S = 0.5
ENDS_SOON = timedelta(days=14)


def name(address: str) -> Finding:
    """Whether the host name has an address here."""
    host = parse_address(address).host
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return failure("NAME_UNKNOWN", f"{host} has no address on this machine: {error.strerror or error}")
    return ok(f"{host} is {', '.join(sorted(found)[:4])}")


def port(address: str, dial_s: float = DIAL_S) -> Finding:
    """Whether something listens there, and how long a round trip takes."""
    wanted = parse_address(address)
    trips: list[float] = []
    for _ in range(DIALS):
        began = time.monotonic()
        try:
            socket.create_connection((wanted.host, wanted.port), dial_s).close()
        except ConnectionRefusedError:
            return failure("PORT_CLOSED", f"{wanted.host} refuses connections to port {wanted.port}: nobody listens")
        except TimeoutError:
            return failure(
                "PORT_SILENT", f"no answer from {address} within {dial_s:g} s, not even a refusal: packets are dropped"
            )
        except OSError as error:
            return failure("PORT_SILENT", f"{address} cannot be reached: {error.strerror or error}")
        trips.append(time.monotonic() - began)
    return round_trip(address, min(trips))


def round_trip(address: str, seconds: float) -> Finding:
    """The finding of a port that answers."""
    what = f"{address} answers; a round trip takes {1000 * seconds:.3g} ms"
    if seconds > FAR_S:
        return warning("LINK_FAR", what, round_trip_s=seconds)
    return ok(what, round_trip_s=seconds)


def handshake(
    address: str, files: TlsFiles | None,
    cause_at: Callable[[str, TlsFiles | None], HandshakeFailed | None] = find_cause,
) -> Sequence[Finding]:  # fmt: skip
    """Whether both sides agree on TLS, and for how long."""
    cause = cause_at(address, files)
    if cause is not None:
        return [of_error(cause)]
    if files is None:
        return [ok(f"{address} is called in plaintext")]
    certificate = certificate_at(address)
    ends = {f"the certificate of {address}": certificate.not_valid_after_utc} if certificate is not None else {}
    if files.certificate is not None:
        ends[f"the certificate in {files.folder} ({files.subject})"] = files.certificate.not_valid_after_utc
    now = datetime.now(UTC)
    return [validity(whose, until, now) for whose, until in ends.items()] or [ok(f"{address} speaks TLS")]


def validity(whose: str, until: datetime, now: datetime) -> Finding:
    """For how long a certificate holds."""
    what = f"{whose} holds until {shown(until)}"
    return warning("CERTIFICATE_ENDS_SOON", what) if until - now < ENDS_SOON else ok(what)
