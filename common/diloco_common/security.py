"""The bearer token: shards ask for it, learners send it."""

from __future__ import annotations

from diloco_common.errors import ConfigError
from diloco_common.settings import SecuritySettings


def read_bearer_token(settings: SecuritySettings) -> str | None:
    """The bearer token in `security.token_file`; None if no file is set. Raises ConfigError."""
    path = settings.token_file
    if path is None:
        return None
    try:
        bearer_token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"security.token_file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"security.token_file {path}: a bearer token is plain ASCII") from None
    if len(bearer_token) < 16 or any(c.isspace() for c in bearer_token):
        raise ConfigError(f"security.token_file {path}: a bearer token is one word of at least 16 characters")
    return bearer_token
