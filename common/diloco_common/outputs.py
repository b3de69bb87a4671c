"""Files that a command writes at its end: that they can be written is asked at its beginning."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from diloco_common.errors import ConfigError


def check_outputs(*paths: Path | None) -> None:
    """Make the folders of these files; None is passed over.

    Raises ConfigError for a file that cannot be written, before hours of work and not after them.
    """
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file", str(path))
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from None
