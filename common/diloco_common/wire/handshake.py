"""Finds out why no call gets through: gRPC says only "Socket closed", whatever made the handshake fail.

`find_cause` checks the certificates and connects with Python's ssl. In TLS 1.3 the server checks the caller's
certificate after the caller's side of the handshake is done. So the caller sees a refusal only at its first read: as an
alert or, from gRPC, as the end of the connection.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from diloco_common.errors import (
    CertificateNotValid,
    ConfigError,
    ForeignCertificate,
    HandshakeFailed,
    NotAShard,
    TlsMismatch,
    WrongHost,
)
from diloco_common.trust.files import CERTIFICATE, KEY, TlsFiles, shown
from diloco_common.wire.addresses import parse_address
from diloco_common.wire.calls import DIAL_S

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes of an HTTP/2 client, with empty settings. A server answers with its own settings."""
SETTINGS = b"\4"
"""Type of a server's first frame, at offset 3."""
EXPIRED, NOT_YET_VALID, HOST_DIFFERS, IP_DIFFERS = 10, 9, 62, 64
"""X509_V_ERR_... of OpenSSL."""


def find_cause(address: str, files: TlsFiles | None) -> HandshakeFailed | None:
    """Why calls with these files do not get through to host:port. None: the cause is unknown, or all is well now.

    Takes up to three times `DIAL_S`, and blocks meanwhile. Raises no network errors.
    """
    try:
        if files is None:
            return _plaintext_cause(address)
        return _own_cause(files, datetime.now(UTC)) or _tls_cause(address, files)
    except OSError:  # nobody listens, or the connection broke: gRPC reports that well enough
        return None


def _plaintext_cause(address: str) -> HandshakeFailed | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _dial(address) as raw, context.wrap_socket(raw, server_hostname=parse_address(address).host):
            pass
    except ssl.SSLError:
        return _http_cause(address)
    return TlsMismatch(
        f"{address} speaks TLS, but this caller plaintext; set security.tls (tls= of join) to the folder that "
        "`diloco certs issue` made for it"
    )


def _http_cause(address: str) -> NotAShard | None:
    """The error for an HTTP port. If it is a shard's, its status says where the shard listens. Raises OSError."""
    wanted = parse_address(address)
    asked = http.client.HTTPConnection(wanted.host, wanted.port, timeout=DIAL_S)
    try:
        asked.request("GET", "/status")
        status = json.loads(asked.getresponse().read(8 << 20))
        port = parse_address(status["grpc"]).port
    except http.client.BadStatusLine:  # most likely gRPC
        return None
    except (http.client.HTTPException, ValueError, TypeError, KeyError, ConfigError):
        return NotAShard(f"{address} is an HTTP port, not a shard; give the address of gRPC (shard.listen)")
    finally:
        asked.close()
    return NotAShard(
        f"{address} is the HTTP port of a shard (shard.http); give the address at which it listens for gRPC: "
        f"{wanted.host}:{port}"
    )


def _own_cause(files: TlsFiles, now: datetime) -> HandshakeFailed | None:
    certificate = files.certificate
    if certificate is None:
        return None
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    whose = f"the certificate in {files.folder}"
    if now >= ends:
        return CertificateNotValid(
            f"{whose} expired at {shown(ends)}; renew it with `diloco certs issue {files.subject}` (it is read again "
            f"without a restart). If that is in the future, this machine's clock is wrong: it says {shown(now)}"
        )
    if now < begins:
        return CertificateNotValid(
            f"{whose} is valid from {shown(begins)}, but this machine's clock says {shown(now)}; set the clock"
        )
    if not any(_has_signed(ca, certificate) for ca in x509.load_pem_x509_certificates(files.ca)):
        return ForeignCertificate(
            f"{whose} is not from the CA beside it; copy the whole folder of one `diloco certs issue`"
        )
    return None


def _has_signed(ca: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _tls_cause(address: str, files: TlsFiles) -> HandshakeFailed | None:
    """The problem between the caller and the port. Raises OSError for network problems."""
    try:
        with (
            _dial(address) as raw,
            _context(files).wrap_socket(raw, server_hostname=parse_address(address).host) as sock,
        ):
            return _first_words(address, files, sock)
    except ssl.SSLCertVerificationError as error:
        return _shards_certificate(address, files, error)
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
            return TlsMismatch(
                f"{address} speaks plaintext, but this caller TLS; give the shard a certificate (security.tls), or "
                "leave security.tls (tls= of join) out here"
            )
        return _refused(address, files) if "ALERT" in (error.reason or "") else None


def _first_words(address: str, files: TlsFiles, sock: ssl.SSLSocket) -> HandshakeFailed | None:
    """Say hello after the handshake, and see whether the shard answers. Raises SSLError for an alert, OSError."""
    try:
        sock.sendall(HELLO)
        answer = sock.recv(9)
    except (ConnectionError, ssl.SSLEOFError):
        answer = b""
    return None if answer[3:4] == SETTINGS else _refused(address, files)


def _refused(address: str, files: TlsFiles) -> HandshakeFailed:
    """The shard ended the connection because of the caller's certificate, or because there was none."""
    if files.pair is None:
        return ForeignCertificate(
            f"{address} asks for a certificate, but {files.folder} holds none; copy the whole folder that "
            "`diloco certs issue` made"
        )
    return ForeignCertificate(
        f"{address} does not take the certificate in {files.folder}: it has another CA, or its clock is wrong; "
        "compare ca.pem and the clocks on both sides"
    )


def _shards_certificate(address: str, files: TlsFiles, error: ssl.SSLCertVerificationError) -> HandshakeFailed:
    found, now = certificate_at(address), datetime.now(UTC)
    if error.verify_code == EXPIRED:
        when = shown(found.not_valid_after_utc) if found else "some time ago"
        return CertificateNotValid(
            f"the certificate of {address} expired at {when}; renew it there (`diloco certs issue shard/N`; it is read "
            f"again without a restart). If that is in the future, this machine's clock is wrong: it says {shown(now)}"
        )
    if error.verify_code == NOT_YET_VALID:
        when = shown(found.not_valid_before_utc) if found else "later"
        return CertificateNotValid(
            f"the certificate of {address} is valid from {when}, but this machine's clock says {shown(now)}; "
            "set the clock"
        )
    if error.verify_code in (HOST_DIFFERS, IP_DIFFERS):
        host = parse_address(address).host
        return WrongHost(
            f"the certificate of {address} is for {_names(found)}, not for {host}; dial it under one of these names, "
            f"or issue it again with --host {host}"
        )
    return ForeignCertificate(
        f"the certificate of {address} is not from the CA in {files.folder} ({error.verify_message}); both sides need "
        "the same ca.pem, unless somebody else answers there"
    )


def certificate_at(address: str) -> x509.Certificate | None:
    """The certificate of a port, whoever issued it; None: it has no certificate, or nobody listens."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _dial(address) as raw, context.wrap_socket(raw) as sock:
            shown_there = sock.getpeercert(binary_form=True)
    except OSError:
        return None
    return None if shown_there is None else x509.load_der_x509_certificate(shown_there)


def _names(certificate: x509.Certificate | None) -> str:
    if certificate is None:
        return "other names"
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return "no name"
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return ", ".join(hosts)[:200] or "no name"


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=files.ca.decode())
    context.set_alpn_protocols(["h2"])
    if files.pair is not None:
        context.load_cert_chain(files.folder / CERTIFICATE, files.folder / KEY)
    return context


def _dial(address: str) -> socket.socket:
    wanted = parse_address(address)
    return socket.create_connection((wanted.host, wanted.port), DIAL_S)
