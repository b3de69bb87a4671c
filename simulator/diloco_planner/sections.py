"""The format of a file of sites: the keys of each section, and how each value is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from diloco_common import units
from diloco_planner.chips import PRESETS, YEAR_S

Parse = Callable[[Any], Any]


def _of(parse: Callable[[str], float], low: float, high: float, words: str) -> tuple[Parse, str]:
    def convert(value: Any) -> float:
        number = parse(value) if isinstance(value, str) else float(value)
        if isinstance(value, bool) or not low <= number <= high:
            raise ValueError
        return number

    return convert, words


def _whole(low: int, high: int, words: str) -> tuple[Parse, str]:
    parse, _ = _of(units.whole, low, high, words)

    def convert(value: Any) -> int:
        number = parse(value)
        if number != int(number):
            raise ValueError
        return int(number)

    return convert, words


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _name(value: Any) -> str:
    """Learners are named after their site, and a learner id has at most 64 letters."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,58}", _text(value)):
        raise ValueError
    return str(value)


def _date(value: Any) -> str:
    if not isinstance(value, date):
        raise ValueError
    return value.isoformat()


LEARNERS_MAX = 10_000
_TIME = _of(units.seconds, 0, 1000 * YEAR_S, 'a time, such as "90s", "20m" or "1y"')
_SOME_TIME = _of(units.seconds, 1e-4, 1000 * YEAR_S, 'a time from 0.1 ms, such as "90s", "20m" or "1y"')
_DELAY = _of(units.seconds, 0, 60, 'a time up to 60 s, such as "80ms"')
_RATE = _of(units.bits_per_s, 1e3, 1e15, 'a rate from 1 kbit/s, such as "5Gbit" or "600MB"')
_LEARNERS = _whole(1, LEARNERS_MAX, f"a whole number from 1 to {LEARNERS_MAX:,}")
_WHOLE = _whole(1, 1_000_000_000, "a whole number from 1 to 10^9")
_SPARES = _whole(0, 1_000_000_000, "a whole number from 0 to 10^9")
_COUNT = _whole(1, 4096, "a whole number from 1 to 4096")
_TOKENS = _whole(1, 10**12, 'tokens, such as "1M"')
_BYTES = _of(units.num_bytes, 1e6, 1e15, 'bytes from 1 MB, such as "80GB"')
_SHARE = _of(float, 0, 1, "a share from 0 to 1")
_PRICE = _of(float, 0, 1e9, "a price from 0")

FAILING: Mapping[str, tuple[Parse, str]] = {
    "mtbi": _SOME_TIME, "repair": _TIME, "loss": _TIME, "join": _TIME, "restart": _TIME, "checkpoint": _SOME_TIME,
    "preempt_every": _SOME_TIME, "preempt_for": _TIME,
    "notice": _TIME,
}  # fmt: skip
"""Keys for `Failures`, allowed for all sites together and for a single site."""
SITE: Mapping[str, tuple[Parse, str]] = {
    "name": (_name, 'a name, such as "oregon-2": up to 58 of A-Z a-z 0-9 . _ -'), "learners": _LEARNERS,
    "chips": _WHOLE, "slice": _WHOLE, "spares": _SPARES,
    "elastic": (_flag, "true or false"), "mirror": (_flag, "true or false"),
    "step_time": _SOME_TIME, "noise": _SHARE, "up": _RATE, "down": _RATE,
    "round_trip": _DELAY, "tokens_per_step": _TOKENS,
    "memory": _BYTES,
    "price_chip_hour": _PRICE, "price_egress_gb": _PRICE, "price_ingress_gb": _PRICE,
    **FAILING,
}  # fmt: skip
FAILURES = {"preset": (_text, f"one of {', '.join(PRESETS)}"), **FAILING}
SHARDS: Mapping[str, tuple[Parse, str]] = {
    "count": _COUNT, "site": (_text, "the name of a site"), "merge": _RATE, "disk": _RATE,
    "price_hour": _PRICE,
}  # fmt: skip
PRICES: Mapping[str, tuple[Parse, str]] = {
    "currency": (_text, "a name in quotes, such as \"USD\""), "date": (_date, "a date without quotes: 2026-05-01"),
}  # fmt: skip
SECTIONS = {"site": SITE, "failures": FAILURES, "shards": SHARDS, "prices": PRICES}
