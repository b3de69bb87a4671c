"""What must not be overwritten: an authority, and certificates and tokens of others."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from diloco_common.errors import ConfigError, DilocoError
from diloco_common.trust.identity import Subject
from diloco_common.trust.revocations import REVOKED
from diloco_common.trust.tls import CA, CERTIFICATE, KEY, subject_of_certificate
from diloco_common.trust.tokens import TOKEN_MAX, verify_token
from diloco_deploy.certs.registry import ISSUED

CA_KEY, TOKEN_KEY, TOKEN_PUBLIC = "ca.key", "token.key", "token.pub"
_BESIDE_THE_KEY = (CA, TOKEN_KEY, TOKEN_PUBLIC, ISSUED, REVOKED)


def check_no_authority(folder: Path) -> None:
    """Where no authority's key is, nothing else of one may be: it would be lost. Raises ConfigError."""
    found = [name for name in _BESIDE_THE_KEY if os.path.lexists(folder / name)]
    if found:
        raise ConfigError(
            f"{folder} holds {', '.join(found)} of an authority, but not its {CA_KEY}; bring that back, give another "
            "--folder, or remove these files if the authority is no more"
        )


def check_free_for_certificate(into: Path, subject: Subject, ca: bytes) -> None:
    """A folder may hold a certificate of the same subject, or nothing that is written there. Raises ConfigError.

    `ca`: ca.pem of the authority that issues.
    """
    if any(os.path.lexists(into / name) for name in (CA_KEY, TOKEN_KEY, ISSUED)):
        raise ConfigError(f"{into} is the folder of an authority; give a certificate a folder of its own (--out)")
    if os.path.lexists(into / CERTIFICATE):
        held = _subject_in(into / CERTIFICATE)
        if held != subject:
            raise ConfigError(f"{into} holds a certificate of {held or 'somebody else'}, not of {subject}; {_ELSE}")
        return
    if os.path.lexists(into / KEY):
        raise ConfigError(f"{into} holds {KEY} without a certificate: nobody knows whose it is; {_ELSE}")
    if os.path.lexists(into / CA) and not _holds(into / CA, ca):
        raise ConfigError(f"{into} holds {CA} of another authority; {_ELSE}")


def check_free_for_token(path: Path, subject: Subject, authority: Path, key: Ed25519PublicKey) -> None:
    """A file may hold a token of the same subject, or not be there. Raises ConfigError.

    `authority`: its folder, in which its own files are to be. `key`: with which it signs.
    """
    if path.name in (CA_KEY, *_BESIDE_THE_KEY) and path.parent.resolve() == authority.resolve():
        raise ConfigError(f"{path} is a file of the authority; {_ELSE}")
    if not os.path.lexists(path):
        return
    try:
        with path.open("rb") as file:
            held = verify_token(key, file.read(TOKEN_MAX + 2).decode().strip()).subject
    except (OSError, ValueError, DilocoError):
        raise ConfigError(f"{path} exists and holds no token of this authority; {_ELSE}") from None
    if held != subject:
        raise ConfigError(f"{path} holds a token of {held}, not of {subject}; {_ELSE}")


_ELSE = "give another --out, or remove it if nobody needs it"


def _subject_in(certificate: Path) -> Subject | None:
    try:
        return subject_of_certificate(certificate.read_bytes(), certificate)
    except (OSError, ValueError, ConfigError):
        return None


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False
