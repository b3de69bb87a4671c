"""What somebody wrote who got it wrong, and which known word was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest of the known words, as the end of a message; empty if none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def shown(value: object) -> str:
    """As a message quotes what was given: itself, if it is a short plain value, else of which type it is."""
    if isinstance(value, type):
        return f"the class {value.__name__}, not an instance"
    is_plain = value is None or isinstance(value, bool | int | float | str | list | tuple | dict | set)
    words = repr(value) if is_plain else ""
    return words if is_plain and len(words) <= 60 and words.isprintable() else f"of type {type(value).__name__}"
