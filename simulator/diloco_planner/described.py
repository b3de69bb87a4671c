"""A run as a TOML file says it: sites with machines, links and prices, how chips fail, shards. See docs/planner.md.

What is wrong is said with its line, and with what to write instead.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

from diloco_common import quantities
from diloco_common.errors import ConfigError, did_you_mean
from diloco_planner.chips import PRESETS, YEAR_S, Failures, Island
from diloco_planner.world import LearnerPlan, Link, ShardPlan


def duration(text: str) -> float:
    """As `quantities.seconds`, and years: 1y. Raises ValueError."""
    text = text.strip()
    return float(text[:-1]) * YEAR_S if text.endswith("y") else quantities.seconds(text)


def bits_per_s(text: str) -> float:
    """5Gbit, 5Gbit/s, 600MB/s. Raises ValueError."""
    plain = text.strip().removesuffix("/s").removesuffix("ps")
    found = re.fullmatch(r"(.*?)(bits?|B)?", plain)
    assert found is not None
    return quantities.num_bytes(found[1]) * (8 if found[2] == "B" else 1)


Parse = Callable[[Any], Any]


def _of(parse: Callable[[str], float], low: float, high: float, words: str) -> tuple[Parse, str]:
    def convert(value: Any) -> float:
        number = parse(value) if isinstance(value, str) else float(value)
        if isinstance(value, bool) or not low <= number <= high:
            raise ValueError
        return number

    return convert, words


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _date(value: Any) -> str:
    if not isinstance(value, date):
        raise ValueError
    return value.isoformat()


_TIME = _of(duration, 0, 1000 * YEAR_S, 'a time, such as "90s", "20m" or "1y"')
_SOME_TIME = _of(duration, 1e-4, 1000 * YEAR_S, 'a time from 0.1 ms, such as "90s", "20m" or "1y"')
_RATE = _of(bits_per_s, 1, 1e15, 'a rate, such as "5Gbit" or "600MB"')
_COUNT = _of(float, 0, 1e12, "a number from 0")
_WHOLE = _of(float, 1, 1e6, "a whole number from 1")
_TOKENS = _of(quantities.count, 1, 1e12, 'tokens, such as "1M"')
_BYTES = _of(quantities.num_bytes, 1, 1e15, 'bytes, such as "80GB"')
_SHARE = _of(float, 0, 1, "a share from 0 to 1")
_PRICE = _of(float, 0, 1e9, "a price from 0")

SITE: Mapping[str, tuple[Parse, str]] = {
    "name": (_text, "a name in quotes"), "learners": _WHOLE, "chips": _COUNT, "slice": _WHOLE, "spares": _COUNT,
    "elastic": (_flag, "true or false"), "step_time": _SOME_TIME, "noise": _SHARE, "up": _RATE, "down": _RATE,
    "round_trip": _TIME, "begins": _TIME, "tokens_per_step": _TOKENS,
    "memory": _BYTES,
    "price_chip_hour": _PRICE, "price_egress_gb": _PRICE, "price_ingress_gb": _PRICE,
}  # fmt: skip
FAILURES: Mapping[str, tuple[Parse, str]] = {
    "preset": (_text, f"one of {', '.join(PRESETS)}"), "mtbi": _SOME_TIME, "repair": _TIME, "loss": _TIME,
    "join": _TIME, "restart": _TIME, "checkpoint": _SOME_TIME, "slow_every": _SOME_TIME, "slow_pace": _SHARE,
    "slow_for": _TIME, "preempt_every": _SOME_TIME, "preempt_for": _TIME, "notice": _TIME,
}  # fmt: skip
SHARDS: Mapping[str, tuple[Parse, str]] = {
    "count": _WHOLE, "site": (_text, "the name of a site"), "merge": _RATE, "disk": _RATE, "restart_every": _SOME_TIME,
    "restart": _TIME, "price_hour": _PRICE,
}  # fmt: skip
PRICES: Mapping[str, tuple[Parse, str]] = {
    "currency": (_text, "a name in quotes, such as \"USD\""), "date": (_date, "a date without quotes: 2026-05-01"),
}  # fmt: skip
SECTIONS = {"site": SITE, "failures": FAILURES, "shards": SHARDS, "prices": PRICES}


@dataclass(frozen=True)
class Site:
    """Machines in one place."""

    name: str
    learners: int = 1
    chips: float | None = None
    """Of each learner; None: its part of all."""
    price_chip_hour: float = 0.0
    price_egress_gb: float = 0.0
    """Of what leaves the site, per GB of 10^9 bytes."""
    price_ingress_gb: float = 0.0
    memory: float | None = None
    """Of a chip, in bytes."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What else the file says of it."""


@dataclass(frozen=True)
class Described:
    """All of a file."""

    sites: tuple[Site, ...] = ()
    failures: Failures | None = None
    """None: the file says nothing of them."""
    shards: ShardPlan = field(default_factory=ShardPlan)
    shards_at: str = ""
    """The site whose egress carries all versions; else that of the first."""
    price_shard_hour: float = 0.0
    currency: str = ""
    date: str = ""
    """Of the prices."""

    def learners(self, template: LearnerPlan, chips: float, learners: int) -> list[LearnerPlan]:
        """One plan per learner: those of the sites, else so many alike."""
        failures = self.failures or template.failures
        base = replace(template, failures=failures)
        if not self.sites:
            island = replace(base.island, chips=chips / learners)
            return [replace(base, name=f"learner-{i}", island=island) for i in range(learners)]
        total = sum(site.learners for site in self.sites)
        plans = []
        for site in self.sites:
            v = site.values
            island = Island(
                site.chips if site.chips is not None else chips / total, v.get("slice", base.island.slice_chips),
                int(v.get("spares", base.island.spares)), v.get("elastic", base.island.elastic),
            )  # fmt: skip
            down = v.get("down", v.get("up", math.inf))
            link = Link(v.get("up", math.inf), down, v.get("round_trip", 0.0))
            plan = replace(
                base, island=island, link=link, step_s=v.get("step_time", base.step_s),
                noise=v.get("noise", base.noise), begins_s=v.get("begins", 0.0),
                tokens_per_step=int(v.get("tokens_per_step", base.tokens_per_step)),
            )  # fmt: skip
            plans += [replace(plan, name=f"{site.name}-{i}") for i in range(site.learners)]
        return plans

    def site_of(self, learner: str) -> Site | None:
        return next((site for site in self.sites if learner.rpartition("-")[0] == site.name), None)


def read(path: Path) -> Described:
    """Raises ConfigError, with file:line, what is wrong and what to do."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file that docs/planner.md explains") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: this is no UTF-8 text; give a file that docs/planner.md explains") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        line = found[1] if found else len(text.splitlines())
        raise ConfigError(f"{path}:{line}: this is no TOML: {error}; put texts in quotes, one key per line") from None
    lines = _Lines(path, text)
    for name, value in tree.items():
        if name not in SECTIONS:
            raise lines.wrong(name, 0, "", f"there is no section {name}", _one_of(SECTIONS, name))
        tables = value if name == "site" else [value]
        if not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
            how = "[[site]] once per site" if name == "site" else f"[{name}] once"
            raise lines.wrong(name, 0, "", f"{name} is written otherwise", f"write {how}")
    sites = [_section(lines, "site", i, value) for i, value in enumerate(tree.get("site", ()))]
    for i, found_site in enumerate(sites):
        if "name" not in found_site:
            raise lines.wrong("site", i, "", "the site has no name", 'write name = "oregon" below it')
        if any(other["name"] == found_site["name"] for other in sites[:i]):
            raise lines.wrong("site", i, "name", f"there is a site {found_site['name']} above", "give it another name")
    shards, failures = (_section(lines, name, 0, tree.get(name, {})) for name in ("shards", "failures"))
    prices = _section(lines, "prices", 0, tree.get("prices", {}))
    at = shards.get("site", "")
    if at and at not in {site["name"] for site in sites}:
        raise lines.wrong("shards", 0, "site", f"there is no site {at}", "name one of the sites of this file")
    has_prices = any(key.startswith("price_") and value for one in [*sites, shards] for key, value in one.items())
    if has_prices and "date" not in prices:
        raise lines.wrong("prices", 0, "", "prices have no date", "write [prices] with date = 2026-05-01: they change")
    if "date" in prices and not sites:
        raise lines.wrong("prices", 0, "", "there are prices and no site", "write a [[site]]")
    return Described(
        tuple(_site(one) for one in sites),
        _failures(lines, failures) if failures else None,
        ShardPlan(
            int(shards["count"]) if "count" in shards else None, shards.get("merge", 8 * ShardPlan.merge_bytes_s) / 8,
            shards.get("disk", math.inf) / 8, shards.get("restart_every", math.inf), shards.get("restart", 60.0),
        ),
        at, shards.get("price_hour", 0.0), prices.get("currency", ""), prices.get("date", ""),
    )  # fmt: skip


def _site(values: Mapping[str, Any]) -> Site:
    own = {f.name for f in fields(Site)} - {"values"}
    given = {key: value for key, value in values.items() if key in own}
    given["learners"] = int(given.get("learners", 1))
    return Site(**given, values={key: value for key, value in values.items() if key not in own})


def _failures(lines: _Lines, values: dict[str, Any]) -> Failures:
    name = values.pop("preset", "paper")
    if name not in PRESETS:
        raise lines.wrong("failures", 0, "preset", f"there is no preset {name}", _one_of(PRESETS, name))
    return replace(PRESETS[name], **{key if key == "slow_pace" else f"{key}_s": v for key, v in values.items()})


def _section(lines: _Lines, name: str, index: int, values: Mapping[str, Any]) -> dict[str, Any]:
    known, found = SECTIONS[name], {}
    for key, value in values.items():
        if key not in known:
            raise lines.wrong(name, index, key, f"{name} has no {key}", _one_of(known, key))
        parse, words = known[key]
        try:
            found[key] = parse(value)
        except (ValueError, TypeError):
            raise lines.wrong(name, index, key, f"{key} is {value!r}", f"write {words}") from None
    return found


def _one_of(known: Iterable[str], given: str) -> str:
    names = list(known)
    return f"write one of {', '.join(names)}{did_you_mean(given, names)}"


class _Lines:
    """Where a key of a section is."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._lines = path, text.splitlines()

    def wrong(self, section: str, index: int, key: str, what: str, do: str) -> ConfigError:
        seen, at = -1, 0
        for number, line in enumerate(self._lines, 1):
            words = line.strip()
            if re.match(rf"\[+\s*{re.escape(section)}\s*\]", words):
                seen, at = seen + 1, number if seen + 1 == index else at
            elif words.startswith("["):
                continue
            elif key and seen == index and re.match(rf"[\"']?{re.escape(key)}[\"']?\s*=", words):
                at = number
                break
        return ConfigError(f"{self._path}:{at or 1}: {what}; {do}")
