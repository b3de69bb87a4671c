"""Commands on pages of the documentation, which tests follow."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

UNTESTED = "untested: "
"""What the name of a block begins with that no test runs; the rest says why."""
SHELLS = ("", "sh", "bash", "shell", "console")
_FENCED = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.M | re.S)


def blocks(page: Path) -> dict[str, str]:
    """Name -> commands, of the fenced blocks that begin with ```sh NAME.

    Raises ValueError if a block of commands has no name of its own, or a block no language, so that it may hold any.
    """
    found: dict[str, str] = {}
    for info, text in _FENCED.findall(page.read_text(encoding="utf-8")):
        language, _, name = info.partition(" ")
        if language not in SHELLS:
            continue
        if language != "sh" or not name or name in found:
            raise ValueError(f"{page}: a block has no name of its own, so nothing says whether it is tested:\n{text}")
        found[name] = textwrap.dedent(text)
    return found


def followed(page: Path) -> dict[str, str]:
    """The blocks that a test must run, in the order of the page."""
    return {name: text for name, text in blocks(page).items() if not name.startswith(UNTESTED)}
