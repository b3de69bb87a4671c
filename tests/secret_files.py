"""Files with secrets, as only their owner may read them."""

from __future__ import annotations

from pathlib import Path


def secret_file(path: Path, text: str) -> Path:
    """A new file with mode 0600."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path
