"""Finds the line of a key in a TOML file, since `tomllib` keeps no positions."""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

Keys = Sequence[str | int]
"""A path from the top: section, index of the table in a list of tables, key."""


def line_of(text: str, keys: Keys) -> int:
    """The line where the statement with this key begins. `text` must be TOML that has it."""
    lines = text.replace("\r\n", "\n").split("\n")

    def is_there(end: int) -> bool:
        """Whether the first `end` lines, with the rest of their last statement, have the key."""
        while (tree := _parsed(lines[:end])) is None:
            end += 1
        return _has(tree, keys)

    return 1 + bisect_left(range(1, len(lines) + 1), True, key=is_there)


def _parsed(lines: Sequence[str]) -> Any:
    """None if the lines end in the middle of a statement."""
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
