"""`diloco plan`: its flags, and its output: the plan, formulas, settings to paste."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from diloco_common import formulas, units
from diloco_common.errors import ConfigError
from diloco_common.formulas import BITS, LINK_SHARE
from diloco_common.options import Json, number, refuse_idle
from diloco_common.wire.bounds import FRAGMENTS_MAX
from diloco_planner.chips import Island
from diloco_planner.choice import INSIDE, Choice, PlannedRun, choose, link_words
from diloco_planner.described import Described, read
from diloco_planner.plans import LEARNERS, LearnerPlan, Link, refuse_restless
from diloco_planner.proposed import PlannedTask
from diloco_planner.table import figures, learner_figures, lines_of, settings_of, toml
from diloco_planner.weigh import Weighed, weigh


def parameters_of(name: str) -> int:
    """Number of trainable parameters of the model made by `pkg.module:build` on the meta device. Raises ConfigError."""
    import torch
    from torch import nn

    where, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"--model {name}: write package.module:function; the function makes the model")
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(where), attribute)
        with torch.device("meta"):
            model = build()
    except Exception as error:  # whatever code of the user's raises
        raise ConfigError(f"--model {name}: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {name}: gave a {type(model).__name__}, not a torch module")
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


_PARAMS = number(units.whole, 1, 10**13, "a number of parameters, such as 125M or 70B")
_CHIPS = number(units.whole, 1, 10**9, "a number of chips, such as 4096 or 1.2e6")
_WHOLE = number(units.whole, 1, 1_000_000, "a whole number from 1 to 1,000,000")
_FRAGMENTS = number(units.whole, 1, FRAGMENTS_MAX, f"a whole number from 1 to {FRAGMENTS_MAX:,}")
_TOKENS = number(units.whole, 1, 10**18, "a number of tokens, such as 1T")
_RATE = number(units.bits_per_s, 1e3, 1e13, "a rate, such as 100Mbit, 1Gbit/s or 12MB/s")
_DISK = number(units.num_bytes, 1e5, 1e12, "bytes per second, such as 300MB")
_SECONDS = number(units.seconds, 1e-4, 86_400.0, "a time, such as 1s or 250ms")
_DAYS = number(float, 5e-324, 1e6, "days, above 0 and up to 1,000,000")
_BUDGET = number(units.whole, 0, 1e15, "money, such as 200k, in the currency of the file")
_DELAY = number(units.seconds, 0.0, 60.0, "a time, such as 80ms")
_CHOSEN = "chosen"
USUAL = Link(1e8, 1e8, 0.08)
TOKENS = 10**12
"""Without a flag or a file."""


def _given(options: object) -> dict[str, object]:
    """Flag -> its value, of a group of options."""
    return {"--" + name.replace("_", "-"): value for name, value in vars(options).items()}


@Parameter(name="*")
@dataclass(frozen=True)
class SizeOptions:
    """The model, by its size or as code."""

    params: Annotated[int | None, Parameter(converter=_PARAMS, metavar="125M", help="parameters of the model")] = None
    model: Annotated[
        str | None, Parameter(metavar="PKG:BUILD", help="function that makes the model; it gets no memory")
    ] = None

    @property
    def count(self) -> int:
        """Parameters. Raises ConfigError."""
        if self.params is not None and self.model is None:
            return self.params
        if self.params is None and self.model is not None:
            return parameters_of(self.model)
        raise ConfigError("give --params or --model, one of them: diloco plan --params 125M")


@Parameter(name="*")
@dataclass(frozen=True)
class LearnersOptions:
    """The learners, and the link of each to the shards."""

    learners: Annotated[
        int | None, Parameter(converter=_WHOLE, metavar="L", help="learners of the run", show_default=str(LEARNERS))
    ] = None
    up: Annotated[
        float | None,
        Parameter(
            converter=_RATE, metavar="100Mbit", help="of a learner's link, towards the shards", show_default="100Mbit"
        ),
    ] = None
    down: Annotated[
        float | None,
        Parameter(
            converter=_RATE, metavar="100Mbit", help="of a learner's link, from the shards", show_default="as --up"
        ),
    ] = None
    round_trip: Annotated[
        float | None, Parameter(converter=_DELAY, metavar="80ms", help="there and back", show_default="80ms")
    ] = None
    step_time: Annotated[
        float | None, Parameter(converter=_SECONDS, metavar="1s", help="of one inner step", show_default="1s")
    ] = None

    ranks: Annotated[
        int, Parameter(converter=_WHOLE, metavar="R", help="ranks of a learner that is an island (FSDP2)")
    ] = 1

    @property
    def link(self) -> Link:
        up = self.up or USUAL.up
        return Link(up, self.down or up, USUAL.round_trip_s if self.round_trip is None else self.round_trip)


@Parameter(name="*")
@dataclass(frozen=True)
class ShardsOptions:
    """The cut of the model, and the machines that hold it."""

    fragments: Annotated[
        int | None, Parameter(converter=_FRAGMENTS, metavar="P", help="fragments", show_default=_CHOSEN)
    ] = None
    shards: Annotated[int | None, Parameter(converter=_WHOLE, metavar="S", help="shards", show_default=_CHOSEN)] = None
    outer: Annotated[Literal["nesterov", "sgd", "adam"], Parameter(help="the outer optimizer")] = "nesterov"
    shard_link: Annotated[
        float | None, Parameter(converter=_RATE, metavar="10Gbit", help="link of a shard's machine, each way")
    ] = None
    disk: Annotated[
        float | None, Parameter(converter=_DISK, metavar="300MB", help="what a shard's disk writes in a second")
    ] = None
    companions_every: Annotated[
        int | None,
        Parameter(
            converter=_WHOLE, metavar="N", help="momentum is averaged too, N times as rarely (sync.companions_every)",
            show_default="it is not",
        ),
    ] = None  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True)
class SitesOptions:
    """The machines of a file, and what they are to train."""

    sites: Annotated[
        Path | None,
        Parameter(metavar="FILE.toml", help="machines, failures and prices: weigh ways to train (docs/planner.md)"),
    ] = None
    chips: Annotated[int | None, Parameter(converter=_CHIPS, metavar="N", help="of all learners; with --sites")] = None
    tokens: Annotated[
        int | None, Parameter(converter=_TOKENS, metavar="1T", help="to train; with --sites", show_default="1T")
    ] = None
    tokens_per_step: Annotated[
        int | None, Parameter(converter=_PARAMS, metavar="1M", help="of one learner; with --sites", show_default="1M")
    ] = None
    days: Annotated[float | None, Parameter(converter=_DAYS, metavar="DAYS", help="by when; with --sites")] = None
    budget: Annotated[
        float | None,
        Parameter(converter=_BUDGET, metavar="200k", help="to spend at most; with --sites that has prices"),
    ] = None

    def described(self, others: dict[str, object]) -> Described | None:
        """The machines of the file. None: there is no file. Raises ConfigError for flags that would change nothing.

        `others`: all other flags.
        """
        mine = _given(self)
        if self.sites is None:
            why = "without --sites FILE.toml no ways to train are weighed; add it, or leave out "
            refuse_idle(mine, {flag: why + flag for flag in mine})
            return None
        found = read(self.sites)
        unpriced = f"{self.sites} has no prices; write them with their date (docs/planner.md), or leave out --budget"
        refuse_idle(mine | others, {**found.idle, **({} if found.date else {"--budget": unpriced})})
        if not found.sites:
            raise ConfigError(f"{self.sites} has no site; write a [[site]] for each place, as docs/planner.md explains")
        return found

    def weighed(self, described: Described, asked: PlannedRun) -> Weighed:
        """Raises ConfigError."""
        template = LearnerPlan(
            "", Island(1), described.failures(), asked.step_s, link=asked.link,
            tokens_per_step=self.tokens_per_step or LearnerPlan.tokens_per_step,
        )  # fmt: skip
        plans = described.learners(template, self.chips, asked.learners)
        task = PlannedTask(
            described, tuple(plans), asked.params, self.tokens or TOKENS, self.days, self.budget,
            has_companions=asked.companions_every is not None,
        )  # fmt: skip
        refuse_restless(plans, 3600 * task.hours)
        return weigh(task, asked)


def plan(
    *,
    size: SizeOptions = SizeOptions(),
    who: LearnersOptions = LearnersOptions(),
    where: ShardsOptions = ShardsOptions(),
    at: SitesOptions = SitesOptions(),
    json: Json = False,
) -> int:
    """Propose H, encodings, fragments and shards, and say how much memory, disk and bandwidth the run takes: with the
    formulas, and as settings to paste into run.toml. Nothing is measured, and nobody is asked.
    """
    described = at.described(_given(who) | _given(where))
    asked = PlannedRun(
        size.count, who.learners or LEARNERS, who.link, who.step_time or LearnerPlan.step_s, who.ranks, **vars(where)
    )
    weighed = None if described is None else at.weighed(described, asked)
    asked, choice = (asked, choose(asked)) if weighed is None else (weighed.asked, weighed.choice)
    (_print_json if json else _print)(asked, choice, weighed)
    return 0 if (choice.fits if weighed is None else weighed.works) else 1


def _print_json(asked: PlannedRun, choice: Choice, weighed: Weighed | None) -> None:
    from diloco_common.observe.http import finite

    found = {
        "fits": choice.fits, "settings": settings_of(asked, choice),
        "why": {
            "encodings": choice.why_encodings, "every": choice.why_every, "fragments": choice.why_fragments,
            "shards": choice.why_shards,
        },
        "figures": [row._asdict() for row in (*figures(asked, choice), *learner_figures(asked, choice))],
        **({} if weighed is None else weighed.as_json()),
    }  # fmt: skip
    print(dumps(finite(found), indent=2, allow_nan=False))


def _print(asked: PlannedRun, choice: Choice, weighed: Weighed | None) -> None:
    if weighed is not None:
        print("\n".join([*weighed.lines(), ""]))
    print("\n".join(_said(asked, choice)), flush=True)  # what a learner holds takes torch: seconds to load
    rows = [*figures(asked, choice), *learner_figures(asked, choice)]
    print("\n".join(["", "figures, at these settings:", *lines_of(rows)]))
    title = "settings" if weighed is None or weighed.is_ours else "settings, where you train decoupled all the same"
    print(f"\n{title} (run.toml):\n\n{toml(settings_of(asked, choice))}", end="")


def _said(asked: PlannedRun, choice: Choice) -> Iterator[str]:
    where = "inside one site" if asked.link == INSIDE else link_words(asked.link)
    yield (
        f"{units.count(asked.params)} parameters (N), {asked.learners} learners (L), {asked.step_s:g} s per inner step "
        f"(t), {where}"
    )
    if not choice.fits:
        yield ""
        yield f"Nothing that we would propose: H = {choice.every:,} is far beyond what was measured."
        yield "Train several machines of one place as one learner (docs/islands.md), or find faster links or shards."
    yield ""
    yield f"  push {choice.encodings.push}, pull {choice.encodings.pull}: {choice.why_encodings}"
    yield f"  H = {choice.every}: {choice.why_every}"
    yield f"  P = {choice.fragments}: {choice.why_fragments}"
    yield f"  S = {choice.shards}: {choice.why_shards}"
    yield f"  (the run may take {LINK_SHARE:.0%} of a link; the rest is for bursts and repeats)"
    one = formulas.rate(asked.params_moved, BITS[choice.encodings.pull], choice.every, asked.step_s)
    if (sent := asked.learners * one / choice.shards) > asked.link.up:
        sends, carries = units.bit_rate(sent), units.bit_rate(asked.link.up)
        yield (
            f"  ! a shard sends {sends}, and a learner's link carries {carries} up: "
            "host it where there is more (docs/home.md), raise H, or train fewer parameters (LoRA)"
        )
