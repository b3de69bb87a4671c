"""Metrics of the certificates that a process has."""

from __future__ import annotations

from collections.abc import Callable

from cryptography import x509

from diloco_common.metrics.registry import Declare
from diloco_common.tls import TlsFiles


class Certificates:
    """Present where `security.tls` is set. On shards and on workers."""

    def __init__(self, declare: Declare) -> None:
        self._expires = declare.gauge(
            "diloco_certificate_expires_timestamp_seconds",
            "When a certificate of this process expires, in seconds since 1970: its own, or the authority's (ca).",
            "which",
        )

    def follow(self, files: Callable[[], TlsFiles]) -> None:
        """From now on, tell of these, as they were read last."""
        self._expires.labels("ca").set_function(lambda: _expires(files().ca))
        if files().pair is not None:
            self._expires.labels("own").set_function(lambda: _expires((files().pair or (b"", b""))[1]))


def _expires(pem: bytes) -> float:
    """Of several, that of the first."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
