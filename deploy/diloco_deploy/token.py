"""Makes the bearer token of a run, once, in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from diloco_common.errors import ConfigError

BEARER_TOKEN_BYTES = 32


def make_bearer_token(path: Path) -> bool:
    """Write a random bearer token to `path` (mode 0600), unless the file exists. Returns whether it did.

    Processes that start together agree on one token: the first to create the file decides, and the file is whole when
    it appears. Raises ConfigError.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists():  # check first: the folder may be read-only
            return False
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(BEARER_TOKEN_BYTES) + "\n")
        try:
            os.link(partial, path)
        except FileExistsError:
            return False
        finally:
            partial.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: cannot make a bearer token here: {error.strerror}") from None
    return True
