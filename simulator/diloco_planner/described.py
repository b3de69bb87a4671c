"""A run as described by a TOML file: sites with machines, links and prices, failures, shards. See docs/planner.md.

This file first lists the keys of each section, and how their values are read. Errors name the key, and say what to
write instead.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from diloco_common import units
from diloco_common.errors import ConfigError, did_you_mean, shown
from diloco_planner.chips import PRESETS, YEAR_S, Failures, Island
from diloco_planner.plans import LearnerPlan, Link, ShardPlan

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
"""Keys for `Failures`. They may be given for all sites together, and for a single site."""
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


FLAGS = {
    "--learners": "learners", "--chips": "chips", "--step-time": "step_time", "--tokens-per-step": "tokens_per_step",
    "--up": "up", "--down": "down", "--round-trip": "round_trip", "--shards": "count", "--disk": "disk",
    "--mtbi": "mtbi",
}  # fmt: skip
"""Flag -> key. The flag counts where a site or [shards] does not have the key."""


@dataclass(frozen=True)
class Site:
    """Machines in one place."""

    name: str
    learners: int = 1
    chips: float | None = None
    """Chips of each learner. None: an equal part of the chips that other sites leave."""
    price_chip_hour: float = 0.0
    price_egress_gb: float = 0.0
    """Price of traffic that leaves the site, per GB of 10^9 bytes."""
    price_ingress_gb: float = 0.0
    mirror: bool = False
    """Whether each shard has a mirror here, so that each version comes once for all learners of the site."""
    memory: float | None = None
    """Memory of a chip, in bytes."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that the file says about the site."""


@dataclass(frozen=True)
class Described:
    sites: tuple[Site, ...] = ()
    preset: str = "paper"
    failing: Mapping[str, float] = field(default_factory=dict)
    """Differences from the preset."""
    shards: ShardPlan = field(default_factory=ShardPlan)
    shards_at: str = ""
    """The shards' site: it pays for sending versions, and its learners need no link. Empty: the first site pays."""
    price_shard_hour: float = 0.0
    currency: str = ""
    date: str = ""
    idle: Mapping[str, str] = field(default_factory=dict)
    """Flags that would change nothing, as the file already decides -> why (`options.refuse_idle`)."""

    def failures(self, preset: str | None = None, mtbi_s: float | None = None) -> Failures:
        """A given preset replaces the preset in the file, but the file's differences from it stay."""
        given = {} if mtbi_s is None else {"mtbi_s": mtbi_s}
        return replace(PRESETS[preset or self.preset], **{**self.failing, **given})

    def learners(self, template: LearnerPlan, chips: float | None, learners: int) -> list[LearnerPlan]:
        """One plan per learner: those of the sites, or else equal ones. `template` has the values that a site lacks.

        Sites without `chips` share the chips that the others leave. Raises ConfigError if these are too few.
        """
        sites = self.sites or (Site("learner", learners),)
        sharing = sum(site.learners for site in sites if site.chips is None)
        if sharing and chips is None:
            raise ConfigError("the number of chips is missing: give --chips N, or write chips = N for each [[site]]")
        left = (chips or 0) - sum(site.learners * site.chips for site in sites if site.chips is not None)
        if sharing and left < sharing:
            raise ConfigError(
                f"--chips {chips:.0f}: {max(0, left):.0f} are left for {sharing} learners, and each needs one; ask for "
                "more chips, or for fewer learners"
            )
        return [
            replace(self._plan(site, template, left / max(1, sharing)), name=f"{site.name}-{i}")
            for site in sites
            for i in range(site.learners)
        ]

    def _plan(self, site: Site, template: LearnerPlan, share: float) -> LearnerPlan:
        """The plan of one learner of a site. `share`: its number of chips, if the site does not give one."""
        v, island, link = site.values, template.island, template.link
        return replace(
            template,
            island=Island(
                share if site.chips is None else site.chips, v.get("slice", island.slice_chips),
                v.get("spares", island.spares), v.get("elastic", island.elastic),
            ),
            link=Link(
                v.get("up", link.up), v.get("down", v.get("up", link.down)), v.get("round_trip", link.round_trip_s)
            ),
            step_s=v.get("step_time", template.step_s), noise=v.get("noise", template.noise),
            failures=replace(template.failures, **_failing(v)),
            tokens_per_step=v.get("tokens_per_step", template.tokens_per_step), site=site.name,
            is_home=site.name == self.shards_at,
        )  # fmt: skip

    def chips_hour(self, plan: LearnerPlan) -> float:
        """Cost per hour of one learner's chips, including spares."""
        site, island = self.site_of(plan.name), plan.island
        each = island.chips / island.slices
        return 0.0 if site is None else (island.chips + island.spares * each) * site.price_chip_hour

    def per_gb(self, plan: LearnerPlan) -> tuple[float, float]:
        """The cost per GB of a learner's contributions and versions. Traffic within the site of the shards is free.
        Versions that come to a mirror are paid for once, and all learners of its site share the cost."""
        site, home = self.site_of(plan.name), self.home
        if site is None or home is None or site is home:
            return 0.0, 0.0
        pulls = site.learners if site.mirror else 1
        return site.price_egress_gb + home.price_ingress_gb, (home.price_egress_gb + site.price_ingress_gb) / pulls

    @property
    def home(self) -> Site | None:
        """The site of the shards, which pays for their egress."""
        return next((s for s in self.sites if s.name == self.shards_at), self.sites[0] if self.sites else None)

    def site_of(self, learner: str) -> Site | None:
        return self._by_name.get(learner.rpartition("-")[0])

    @cached_property
    def _by_name(self) -> dict[str, Site]:
        return {site.name: site for site in self.sites}


def read(path: Path) -> Described:
    """Raises ConfigError, with what is wrong and what to do."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file that docs/planner.md explains") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: this is not UTF-8 text; give a file that docs/planner.md explains") from None
    try:
        tree = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        raise ConfigError(f"{path}: this is no TOML: {error}; put texts in quotes, one key per line") from None
    return _File(path, tree).described()


@dataclass(frozen=True)
class _File:
    path: Path
    tree: dict[str, Any]

    def wrong(self, where: str, what: str, do: str) -> ConfigError:
        return ConfigError(f"{self.path}: {where}: {what}; {do}")

    def described(self) -> Described:
        for name, value in self.tree.items():
            if name not in SECTIONS:
                raise self.wrong(name, "there is no such section", _one_of(SECTIONS, name))
            tables = value if name == "site" else [value]
            if not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
                how = "[[site]] once per site" if name == "site" else f"[{name}] once"
                raise self.wrong(name, "it is not a table", f"write {how}")
        sites = self._sites()
        shards, failures, prices = (
            self._section(name, name, self.tree.get(name, {})) for name in ("shards", "failures", "prices")
        )
        at, preset = shards.get("site", ""), failures.pop("preset", Described.preset)
        if at and at not in {site["name"] for site in sites}:
            raise self.wrong("shards", f"there is no site {at}", "name one of the sites of this file")
        if preset not in PRESETS:
            raise self.wrong("failures", f"there is no preset {preset}", _one_of(PRESETS, preset))
        if "date" not in prices and any(key.startswith("price_") for table in (*sites, shards) for key in table):
            raise self.wrong("prices", "they have no date", "write [prices] with date = 2026-05-01: prices change")
        return Described(
            tuple(_site(one) for one in sites),
            preset,
            _failing(failures),
            ShardPlan(
                shards.get("count"), shards.get("merge", 8 * ShardPlan.merge_bytes_s) / 8,
                shards.get("disk", math.inf) / 8,
            ),
            at, shards.get("price_hour", 0.0), prices.get("currency", ""), prices.get("date", ""),
            self._idle(_of_every(sites), shards),
        )  # fmt: skip

    def _sites(self) -> list[dict[str, Any]]:
        sites = [self._section("site", f"site {i}", table) for i, table in enumerate(self.tree.get("site", ()), 1)]
        for i, site in enumerate(sites):
            if "name" not in site:
                raise self.wrong(f"site {i + 1}", "it has no name", 'write name = "oregon" below it')
            if any(other["name"] == site["name"] for other in sites[:i]):
                raise self.wrong(f"site {i + 1}", f"there is a site {site['name']} above", "give it another name")
        if (learners := sum(site.get("learners", 1) for site in sites)) > LEARNERS_MAX:
            raise self.wrong("site", f"there are {learners:,} learners", f"write {LEARNERS_MAX:,} in all at most")
        return sites

    def _idle(self, of_every: Container[str], shards: Container[str]) -> dict[str, str]:
        return {
            flag: f"{self.path} has {key} {where}; leave out {flag}, or change {key} in the file"
            for flag, key in FLAGS.items()
            for keys, where in ((of_every, "for every site"), (shards, "for the shards"))
            if key in keys
        }

    def _section(self, name: str, where: str, table: Mapping[str, Any]) -> dict[str, Any]:
        """The checked values of a table."""
        found = {}
        for key, value in table.items():
            if key not in SECTIONS[name]:
                raise self.wrong(where, f"there is no key {key}", _one_of(SECTIONS[name], key))
            parse, words = SECTIONS[name][key]
            try:
                found[key] = parse(value)
            except (ValueError, TypeError, OverflowError):
                raise self.wrong(where, f"{key} is {shown(value)}", f"write {words}") from None
        return found


def _failing(values: Mapping[str, Any]) -> dict[str, float]:
    """The values for `Failures` in a section."""
    return {f"{key}_s": value for key, value in values.items() if key in FAILING}


def _site(values: Mapping[str, Any]) -> Site:
    own = {f.name for f in fields(Site)} - {"values"}
    given = {key: value for key, value in values.items() if key in own}
    return Site(**given, values={key: value for key, value in values.items() if key not in own})


def _of_every(sites: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Keys that every site has. `learners` is 1 if a site does not give it, and `down` is then the same as `up`."""
    said = [{"learners", *site, *(["down"] if "up" in site else [])} for site in sites]
    return frozenset(set.intersection(*said)) if said else frozenset()


def _one_of(known: Iterable[str], given: str) -> str:
    names = list(known)
    return f"write one of {', '.join(names)}{did_you_mean(given, names)}"
