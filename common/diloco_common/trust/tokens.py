"""Tokens, and files with secrets, which nobody else may read.

Shards ask for the bearer token that all share, or for signed tokens: what a caller proves itself with where a proxy
ends TLS.

    base64url(claims) "." base64url(signature)

without padding. The claims are a JSON object: run, scope, name, serial and expires (seconds since 1970). The signature
is Ed25519's, over `SIGNED_FOR`, then the first part as it was sent. There is one algorithm, so no field names it.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import stat
from collections.abc import Collection
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from diloco_common.errors import ConfigError, SecretExposed, Unauthenticated
from diloco_common.settings import SecuritySettings
from diloco_common.trust.identity import Proof, subject_of

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

    What is checked is the open file, so nobody can exchange it in between. A link is judged by what it leads to:
    Kubernetes mounts secrets as links.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        user, groups = os.geteuid(), {os.getegid(), *os.getgroups()}
        exposed = exposure(found.st_mode, found.st_uid, found.st_gid, user, groups)
        if exposed is None:
            return file.read()
    what = f"chown {user} {path} && chmod 600 {path}" if found.st_uid not in (user, _ROOT) else f"chmod 600 {path}"
    raise SecretExposed(
        f"{path}: {exposed} (mode {stat.S_IMODE(found.st_mode):04o}), and a secret is for its owner alone: {what}"
    )


def exposure(mode: int, owner: int, group: int, user: int, groups: Collection[int]) -> str | None:
    """Who besides us gets at a file with these permission bits, in words; None if nobody does.

    A file of ours is for us alone. A file of root's may be readable for a group that root lent it to: one of our
    `groups`, which is how Kubernetes hands over a secret (root, fsGroup, 0440), or root's own. The latter is how
    systemd's credentials look: an access list names the service there, and its mask shows as the bits of the group.
    """
    if owner not in (user, _ROOT):
        return f"it belongs to user {owner}"
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        return "everybody can get at it"
    if mode & stat.S_IWGRP:
        return f"group {group} can change it"
    if mode & stat.S_IRGRP and not (owner == _ROOT and (group == _ROOT or group in groups)):
        return f"group {group} can read it"
    return None


SIGNED_FOR = b"diloco signed token 1\n"
"""No signature of this key under anything else is one of a token."""
TOKEN_MAX = 1024
"""Characters."""
_CLAIMS = {"run": str, "scope": str, "name": str, "serial": str, "expires": int}


def sign_token(key: Ed25519PrivateKey, proof: Proof) -> str:
    """A token that proves this."""
    subject = proof.subject
    claims = {
        "run": subject.run_id, "scope": subject.scope.value, "name": subject.name, "serial": proof.serial,
        "expires": int(proof.expires),
    }  # fmt: skip
    first = _encoded(json.dumps(claims, separators=(",", ":")).encode())
    return f"{first}.{_encoded(key.sign(SIGNED_FOR + first.encode()))}"


def verify_token(key: Ed25519PublicKey, token: str) -> Proof:
    """What a token proves. Its expiry is not looked at. Raises Unauthenticated."""
    first, dot, second = token.partition(".")
    if not dot or len(token) > TOKEN_MAX or not token.isascii():
        raise Unauthenticated(
            "the bearer token is no signed token; `diloco token issue` makes one (security.token_file)"
        )
    try:
        key.verify(_decoded(second), SIGNED_FOR + first.encode())
        return _proof_in(json.loads(_decoded(first)))
    except (InvalidSignature, ValueError, ConfigError):  # in this order: nothing unsigned is looked into
        raise Unauthenticated("the signed token was not made with the key of this run, or was changed") from None


def read_token_key(path: Path) -> Ed25519PublicKey:
    """The public key with which shards check tokens, from a PEM file. Raises ConfigError."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"security.token_key {path}: {error.strerror}; `diloco token issue` makes it") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"security.token_key {path}: is not a public key in PEM; give token.pub") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"security.token_key {path}: is not an Ed25519 key; give token.pub")
    return key


def _proof_in(claims: object) -> Proof:
    """Raises ValueError or ConfigError."""
    if not isinstance(claims, dict) or {name: type(value) for name, value in claims.items()} != _CLAIMS:
        raise ValueError("not the claims of a token")
    subject = subject_of(claims["run"], f"{claims['scope']}/{claims['name']}")
    return Proof(subject, claims["serial"], float(claims["expires"]))


def _encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    """Raises ValueError."""
    try:
        part = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    if _encoded(part) != text:
        raise ValueError("not the one way to write these bytes")
    return part
