"""At which line of a TOML file a key stands: `tomllib` keeps no positions."""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

Keys = Sequence[str | int]
"""From the top: section, number of the table in a list of them, key."""


def line_of(text: str, keys: Keys) -> int:
    """Where the statement begins that brings it. The whole text is TOML, and has it."""
    lines = text.replace("\r\n", "\n").split("\n")

    def is_there(end: int) -> bool:
        """In the first so many lines, and what is left of their last statement."""
        while (tree := _parsed(lines[:end])) is None:
            end += 1
        return _has(tree, keys)

    return 1 + bisect_left(range(1, len(lines) + 1), True, key=is_there)


def _parsed(lines: Sequence[str]) -> Any:
    """None: it ends in the middle of a statement."""
    try:
        return tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError:
        return None


def _has(tree: Any, keys: Keys) -> bool:
    for key in keys:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True
