"""Numbers for people: parsed as people write them (2M tokens, 1.5e9, 512MiB, 30s), and shown short with units. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"([+-]?[0-9][0-9_]*(?:\.[0-9_]+)?(?:[eE][+-]?[0-9]+)?|[+-]?\.[0-9]+)\s*([A-Za-zµ]*)")
_THOUSANDS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}
_BYTES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {
    "": "1", "ms": "0.001", "s": "1", "sec": "1", "m": "60", "min": "60", "h": "3600", "d": "86400", "y": "31557600",
}  # fmt: skip
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "float": "float32",
}  # fmt: skip


def whole(text: str) -> int:
    """2M, 1.5e9, 2_000_000, 3k, 1B. Raises ValueError, also for a fraction."""
    number, unit = _split(text)
    if unit.lower() not in _THOUSANDS or unit == "b":  # a lower-case b is a byte or a bit
        raise ValueError(text)
    return _integer(number * 1000 ** _THOUSANDS[unit.lower()], text)


def num_bytes(text: str) -> int:
    """512MiB, 4GB, 4Gi, 1.5e9: bytes. Units with an i are powers of 1024. Raises ValueError."""
    number, unit = _split(text)
    base = unit.lower().removesuffix("b")
    power = 1024 if base.endswith("i") and len(base) > 1 else 1000
    if base.removesuffix("i") not in _BYTES or base == "i":
        raise ValueError(text)
    return _integer(number * power ** _BYTES[base.removesuffix("i")], text)


def bits_per_s(text: str) -> float:
    """100Mbit, 1Gbit/s, 12MB/s: bits per second. A capital B is bytes; without a unit it is bits. Raises ValueError."""
    plain = text.strip().removesuffix("/s").removesuffix("ps")
    for unit, bits in (("bits", 1), ("bit", 1), ("Bytes", 8), ("B", 8), ("b", 1)):
        if plain.endswith(unit):
            return num_bytes(plain.removesuffix(unit)) * bits
    return num_bytes(plain)


def seconds(text: str) -> float:
    """30s, 1.5h, 250ms, 5m (minutes), 1y, 10: seconds. Raises ValueError."""
    number, unit = _split(text)
    if unit not in _SECONDS:
        raise ValueError(text)
    return float(number * Decimal(_SECONDS[unit]))


def dtype(text: str) -> str:
    """Expand a short name: bf16 is bfloat16. Other names stay."""
    return _DTYPES.get(text.lower(), text)


def _split(text: str) -> tuple[Decimal, str]:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    try:
        number = Decimal(found[1].replace("_", ""))
    except InvalidOperation:
        raise ValueError(text) from None
    if abs(number.adjusted()) > 40:
        raise ValueError(text)
    return number, found[2]


def _integer(number: Decimal, text: str) -> int:
    if number != number.to_integral_value():
        raise ValueError(text)
    return int(number)


# ------------------------------------------------------------ shown


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
    """The course of a value in at most `width` characters; each shows the mean of a stretch."""
    if not values or width < 1:
        return ""
    n = min(width, len(values))
    cuts = [len(values) * i // n for i in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    steps = len(_BARS) - 1
    return "".join(_BARS[round((m - low) / (high - low) * steps) if high > low else 0] for m in means)
