"""The bearer token that all processes of a run share, and files with secrets, which nobody else may read."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from diloco_common.errors import ConfigError, SecretExposed
from diloco_common.settings import SecuritySettings

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
        f"{path}: {exposed} (mode {stat.S_IMODE(found.st_mode):04o}), and a secret is for its owner alone: {what}"
    )


def exposure(mode: int, owner: int, group: int, user: int, groups: Collection[int]) -> str | None:
    """Who besides us can access a file with these permission bits, as text; None: nobody.

    Our own file must be for us alone. A file of root's may be readable for a group: one of our `groups`, as Kubernetes
    mounts a secret (root, fsGroup, 0440), or root's own. The latter is how systemd's credentials look: an access list
    names the service, and its mask shows as the group bits.
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
