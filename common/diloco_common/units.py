"""Formats numbers for people: short, with units, and without needless digits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def count(value: float) -> str:
    """1234567 -> "1.23M"."""
    return _scaled(value, "").replace(" ", "")


def counted(number: int, what: str) -> str:
    """1 learner, 2 learners."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def size(num_bytes: float) -> str:
    """1234567 -> "1.23 MB" (powers of 1000)."""
    return _scaled(num_bytes, "B")


def bit_rate(bits_per_s: float) -> str:
    """12345678 -> "12.3 Mbit/s"."""
    return _scaled(bits_per_s, "bit/s")


def _scaled(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            break
        value /= 1000
    digits = 0 if not prefix and value == int(value) else max(0, 2 - (value >= 10) - (value >= 100))
    return f"{value:.{digits}f} {prefix}{unit}".rstrip()


def clock(seconds: float) -> str:
    """83 -> "1:23", 3723 -> "1:02:03"."""
    whole = max(0, int(seconds))
    hours, minutes, left = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def loss(value: float | None) -> str:
    """A loss with three decimals; "-" if there is none yet."""
    return "-" if value is None else f"{value:.3f}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of a value in `width` characters, each the mean of a stretch."""
    if not values or width < 1:
        return ""
    n = min(width, len(values))
    cuts = [len(values) * i // n for i in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    steps = len(_BARS) - 1
    return "".join(_BARS[round((m - low) / (high - low) * steps) if high > low else 0] for m in means)
