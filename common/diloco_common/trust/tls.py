"""The files of TLS: a folder with ca.pem, cert.pem and key.pem, as `diloco certs issue` writes it.

`rpc.py` makes gRPC credentials of them. They are read again when they change, so a certificate is renewed without a
restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from diloco_common.errors import ConfigError, WrongIdentity
from diloco_common.trust.identity import Proof, Subject, subject_of_uri
from diloco_common.trust.tokens import read_private

Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]
"""For each file: its change time, size and inode. None: no file."""


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Changes when one of the files is written, replaced or removed. Links are followed."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


CA, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
SCHEME = "diloco://"
LEARNER_HOST = "learner.diloco.invalid"
"""A name in every learner's certificate, by which Prometheus identifies a worker. Names under .invalid cannot be
dialed, so a learner cannot pass for a shard (RFC 6761)."""


@dataclass(frozen=True)
class TlsFiles:
    """The contents of the folder when it was read, in PEM. The pair is None if there is only ca.pem."""

    folder: Path
    ca: bytes
    pair: tuple[bytes, bytes] | None = None
    """Private key and certificate chain, which match."""

    @property
    def certificate(self) -> x509.Certificate | None:
        return None if self.pair is None else x509.load_pem_x509_certificate(self.pair[1])

    @property
    def subject(self) -> Subject | None:
        """The certificate's subject; None: no certificate. Raises ConfigError."""
        return None if self.pair is None else subject_of_certificate(self.pair[1], self.folder / CERTIFICATE)


class TlsFolder:
    """A folder with TLS files, and their last contents."""

    def __init__(self, folder: Path, *, needs_pair: bool = False) -> None:
        """`needs_pair`: ca.pem alone is not enough. Raises ConfigError, SecretExposed."""
        self._folder, self._needs_pair = folder, needs_pair
        self._stamp: Stamp = ()
        self.why_not = ""
        """Why newer files are not used; empty: no problem."""
        self.files = self._read()

    def refresh(self) -> bool:
        """Read the files again if they changed; returns whether there are new ones. Files that do not match are
        ignored.

        A renewal writes several files. In between, the pair does not match; the next look finds it.
        """
        stamp = stamp_of([self._folder / name for name in (CA, CERTIFICATE, KEY)])
        if stamp == self._stamp:
            return False
        try:
            files = self._read()
        except ConfigError as error:
            self.why_not = str(error)
            return False
        self.why_not = ""
        is_new, self.files = files != self.files, files
        return is_new

    def _read(self) -> TlsFiles:
        stamp = stamp_of([self._folder / name for name in (CA, CERTIFICATE, KEY)])
        files = read_folder(self._folder, needs_pair=self._needs_pair)
        self._stamp = stamp  # taken before reading: later writes are noticed next time
        return files


def read_folder(folder: Path, *, needs_pair: bool = False) -> TlsFiles:
    ca = _read_by(Path.read_bytes, folder / CA)
    _certificates_of(ca, folder / CA)
    certificate, key = folder / CERTIFICATE, folder / KEY
    if not needs_pair and not certificate.exists() and not key.exists():
        return TlsFiles(folder, ca)
    chain, private = _read_by(Path.read_bytes, certificate), _read_by(read_private, key)
    try:
        fits = load_pem_private_key(private, None).public_key() == _certificates_of(chain, certificate)[0].public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{key}: is not an unencrypted private key in PEM: {error}") from None
    if not fits:
        raise ConfigError(f"{key}: is not the key of {certificate}; copy both files of one `diloco certs issue`")
    return TlsFiles(folder, ca, (private, chain))


def subject_of_certificate(pem: bytes, where: object) -> Subject:
    """The subject of a certificate. `where`: its name in errors. Raises ConfigError."""
    uris = _uris(x509.load_pem_x509_certificate(pem))
    if len(uris) != 1:
        raise ConfigError(f"{where}: names {len(uris)} identities of ours (diloco://RUN/...), and should name one")
    return subject_of_uri(uris[0])


@lru_cache(maxsize=4096)
def proof_of(pem: bytes) -> Proof:
    """What a caller's certificate proves. TLS has checked its chain. Raises WrongIdentity."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        subject = subject_of_certificate(pem, "the certificate of this caller")
    except ConfigError as error:
        raise WrongIdentity(f"{error}; make one with `diloco certs issue`") from None
    return Proof(subject, serial_text(certificate.serial_number), certificate.not_valid_after_utc.timestamp())


def serial_text(serial: int) -> str:
    """A serial as in lists and the deny-list."""
    return format(serial, "x")


def shown(moment: datetime) -> str:
    """A moment for people: 2026-11-22 14:00 UTC."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith(SCHEME)]


def _read_by(read: Callable[[Path], bytes], path: Path) -> bytes:
    try:
        return read(path)
    except OSError as error:
        raise ConfigError(
            f"security.tls (tls= of join): {path}: {error.strerror}; `diloco certs issue` makes this folder"
        ) from None


def _certificates_of(pem: bytes, where: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ConfigError(f"security.tls (tls= of join): {where}: holds no certificate in PEM") from None
