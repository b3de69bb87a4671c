"""The files that callers and shards use to trust each other: certificates, the bearer token, and the deny-list.

A TLS folder has ca.pem, cert.pem and key.pem, as `diloco certs issue` writes it; `rpc.py` makes gRPC credentials from
them. The deny-list names revoked certificates by serial, as `diloco certs revoke` writes it:

    {"revoked": [{"serial": "7a01...", "who": "diloco://run/learner/a", "at": "2026-11-22 14:00 UTC"}]}

All files are read again when they change, so a certificate can be renewed without a restart. Only the owner may read a
file with a secret.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from diloco_common.errors import ConfigError, SecretExposed, WrongIdentity
from diloco_common.settings import SecuritySettings
from diloco_common.trust.identity import Proof, Subject, subject_of_uri
from diloco_common.wire.addresses import write_json

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
        """Read the files again if they changed; return whether there are new ones. Ignores files that do not match.

        A renewal writes several files. In between, the pair does not match; a later call finds the complete pair.
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
    """A serial as lists and the deny-list show it."""
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


_ROOT = 0


def read_bearer_token(settings: SecuritySettings) -> str | None:
    """The bearer token in `security.token_file`; None if no file is set. Raises ConfigError, SecretExposed."""
    path = settings.token_file
    if path is None:
        return None
    try:
        bearer_token = read_private(path).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(f"security.token_file (token= of join) {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"security.token_file (token= of join) {path}: a bearer token is plain ASCII") from None
    if len(bearer_token) < 16 or any(c.isspace() for c in bearer_token):
        raise ConfigError(
            f"security.token_file (token= of join) {path}: a bearer token is one word of at least 16 characters"
        )
    return bearer_token


def read_private(path: Path) -> bytes:
    """The bytes of a file with a secret. Raises OSError, SecretExposed.

    The open file is checked, so nobody can replace it in between. Links are followed: Kubernetes mounts secrets as
    links.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        user, groups = os.geteuid(), {os.getegid(), *os.getgroups()}
        exposed = exposure(found.st_mode, found.st_uid, found.st_gid, user, groups)
        if exposed is None:
            return file.read()
    what = f"chown {user} {path} && chmod 600 {path}" if found.st_uid not in (user, _ROOT) else f"chmod 600 {path}"
    raise SecretExposed(
        f"{path}: {exposed} (mode {stat.S_IMODE(found.st_mode):04o}), but only its owner may read a secret: {what}"
    )


def exposure(mode: int, owner: int, group: int, user: int, groups: Collection[int]) -> str | None:
    """A text that says who besides us can access a file with these permission bits; None: nobody.

    Only we may access our own file, unless we are root. A group may read a file that root owns: one of our `groups`, as
    Kubernetes mounts a secret (root, fsGroup, 0440), or root's own group. Systemd's credentials look like the latter:
    an access list names the service, and its mask appears as the group bits.
    """
    if owner not in (user, _ROOT):
        return f"it belongs to user {owner}"
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        return "everybody can access it"
    if mode & stat.S_IWGRP:
        return f"group {group} can change it"
    if mode & stat.S_IRGRP and not (owner == _ROOT and (group == _ROOT or group in groups)):
        return f"group {group} can read it"
    return None


REVOKED = "revoked.json"


@dataclass(frozen=True, slots=True)
class Revocation:
    """One entry of the deny-list."""

    serial: str
    who: str
    """The certificate's subject as a URI. For people."""
    at: str
    """When it was revoked. For people."""


class DenyList:
    def __init__(self, path: Path | None, *, is_required: bool = False) -> None:
        """`path`: if None, nothing is ever revoked. `is_required`: the file must exist. Raises ConfigError."""
        self._path = path
        self._stamp: Stamp = () if path is None else stamp_of([path])
        self.serials: frozenset[str] = frozenset()
        self.why_not = ""
        """Why a newer file is not used; empty: no problem."""
        if path is not None and (is_required or path.exists()):
            self._read(path)

    def refresh(self) -> frozenset[str]:
        """Read the file again if it changed; return the newly listed serials.

        A file that is gone, damaged or incomplete changes nothing: the previous list stays in force.
        """
        if self._path is None or stamp_of([self._path]) == self._stamp:
            return frozenset()
        before = self.serials
        try:
            self._read(self._path)
            self.why_not = ""
        except ConfigError as error:
            self.why_not = str(error)
        return self.serials - before

    def _read(self, path: Path) -> None:
        stamp = stamp_of([path])
        self.serials = frozenset(one.serial for one in read_revocations(path))
        self._stamp = stamp


def read_revocations(path: Path) -> list[Revocation]:
    """Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [Revocation(normal_serial(one["serial"]), str(one["who"]), str(one["at"])) for one in found["revoked"]]
    except OSError as error:
        raise ConfigError(f"the deny-list {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"{path} is not a deny-list; `diloco certs revoke` writes it: copy it again") from None


def write_revocations(path: Path, revocations: list[Revocation]) -> None:
    """Write the list atomically. Raises OSError."""
    write_json(path, {"revoked": [asdict(one) for one in revocations]})


def normal_serial(text: str) -> str:
    """A serial in our form, from any usual form. Raises ValueError if the text is not a serial.

    A JSON number is refused: its digits could be decimal or hexadecimal.
    """
    if not isinstance(text, str):
        raise ValueError(f"a serial is text, not {text!r:.80}")
    return format(int(text.replace(":", ""), 16), "x")
