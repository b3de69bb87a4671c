"""Chooses settings for a link and a number of learners, with reasons. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from diloco_common import formulas, units
from diloco_common.errors import ConfigError
from diloco_common.formulas import BITS, LINK_SHARE
from diloco_common.settings import EVERY_MOST, OVERLAP_STEPS, PATIENCE, SyncSettings
from diloco_common.wire.bounds import FRAGMENTS_MAX
from diloco_planner.plans import Link

DEFAULTS = SyncSettings()
EVERY, EVERY_MEASURED = DEFAULTS.first_every, 48
"""H: the default, and the largest whose quality was measured. We propose at most `EVERY_MOST`, as "auto" does."""
FRAGMENTS, FRAGMENTS_MOST = DEFAULTS.fragments, 256
"""P: the default, and the maximum if each of many shards must own a fragment."""
TRAINING_BYTES = 16
"""Bytes per parameter that training itself needs: weights, gradients, two moments of AdamW."""
FULL = 0.9
"""Highest allowed load of shard machines if their number is given."""


class Encodings(NamedTuple):
    """The encodings of contributions and of versions."""

    push: str
    pull: str


INSIDE = Link()
"""The link within one site, which slows nobody down."""


@dataclass(frozen=True)
class PlannedRun:
    params: float
    learners: int
    link: Link
    step_s: float
    ranks: int = 1
    """Number of ranks of a learner's island over which its parameters are spread (FSDP2). 1: it is no island."""
    fragments: int | None = None
    """P, if given."""
    shards: int | None = None
    outer: str = "nesterov"
    shard_link: float | None = None
    """The link of a shard's machine, in bits per second each way."""
    disk: float | None = None
    """Write rate of a shard machine's disk, in bytes per second."""
    companions_every: int | None = None
    """`sync.companions_every` if the run averages momentum. None: it does not."""
    merge: float = formulas.BYTES_PER_S
    """Payload bytes per second that a shard's machine can receive, merge and send."""

    @property
    def companions_share(self) -> float:
        """What companions add to the model's contributions and bytes, as a share of these. They are sent less often."""
        return 1 / self.companions_every if self.companions_every else 0.0

    @property
    def params_moved(self) -> float:
        """Parameters that move in H steps to and from each learner: N, and companions."""
        return self.params * (1 + self.companions_share)


@dataclass(frozen=True)
class Choice:
    """The settings, with a reason for each."""

    encodings: Encodings
    every: int
    fragments: int
    shards: int
    why_encodings: str
    why_every: str
    why_fragments: str
    why_shards: str

    @property
    def fits(self) -> bool:
        """Whether links and shards can carry the run at all."""
        return self.every <= EVERY_MOST


def choose(asked: PlannedRun) -> Choice:
    """The default encodings, and the smallest H that links and shards can carry, at least the default. Raises
    ConfigError if a shard would own no fragment."""
    encodings = Encodings(DEFAULTS.push, DEFAULTS.pull)
    every, why_every = EVERY, "the default, and the link carries it"
    if (for_link := needed_every(asked.params_moved, encodings, asked.link, asked.step_s)) > every:
        every, why_every = for_link, _link_asks(asked, for_link)
    fragments = asked.fragments or max(_fragments(asked, every), min(asked.shards or 0, FRAGMENTS_MAX))
    push_s = asked.params / fragments * BITS[encodings.push] / asked.link.up + asked.link.round_trip_s
    if push_s > max(PATIENCE * every, OVERLAP_STEPS) * asked.step_s:  # a round waits no longer (docs/wan.md)
        every = math.ceil(push_s / (PATIENCE * asked.step_s))
        why_every = f"a push takes {push_s:.2g} s, and a round waits at most {PATIENCE:g} H steps of {asked.step_s:g} s"
    machines = _machines(asked, encodings, every, fragments)
    enough = max(1, math.ceil(machines.most / LINK_SHARE))
    if asked.shards is None and asked.fragments is None and enough > fragments >= FRAGMENTS:
        fragments = min(enough, FRAGMENTS_MOST)
        machines = _machines(asked, encodings, every, fragments)
    shards = asked.shards or min(enough, fragments)
    if shards > fragments:
        raise ConfigError(
            f"{shards:,} shards are too many for {fragments:,} fragments: each has to own one; ask for fewer shards or "
            "more fragments"
        )
    why_shards = "given" if asked.shards else f"{machines.why}, of which half is used"
    if machines.most > FULL * shards:  # the needs are proportional to 1 / H
        every = math.ceil(every * machines.most / (FULL * shards))
        why_every = f"the smallest with which the shards keep up (S = {shards:,}); at a smaller one {machines.why}"
        why_shards = f"{'given' if asked.shards else 'one for each fragment'}; each is busy for {FULL:.0%} of the time"
    return Choice(
        encodings, every, fragments, shards,
        why_encodings="the defaults",
        why_every=why_every,
        why_fragments="given" if asked.fragments else _why_fragments(asked, fragments),
        why_shards=why_shards,
    )  # fmt: skip


def calls_of(asked: PlannedRun, fragments: int, every: int) -> float:
    """Contributions of all learners per second, including companions."""
    return asked.learners * fragments / (every * asked.step_s) * (1 + asked.companions_share)


def written_of(asked: PlannedRun, pull: str) -> float:
    """Bytes per parameter of the model that a shard writes in H steps, including companions."""
    return formulas.version_bytes(asked.outer, pull) + formulas.companion_bytes(pull) * asked.companions_share


def needed_every(params: float, encodings: Encodings, link: Link, step_s: float) -> int:
    """The smallest H for which half of the link is enough in both directions."""
    up = formulas.every_for_rate(params, BITS[encodings.push], link.up, step_s, LINK_SHARE)
    down = formulas.every_for_rate(params, BITS[encodings.pull], link.down, step_s, LINK_SHARE)
    return max(up, down)


def _link_asks(asked: PlannedRun, every: int) -> str:
    cost = "the loss was 3 % higher at 48" if every <= EVERY_MEASURED else "the loss beyond 48 was not measured"
    return f"the smallest for which half of the link is enough at {asked.step_s:g} s per step; {cost} (docs/quality.md)"


def _fragments(asked: PlannedRun, every: int) -> int:
    """24, or fewer if the calls of many learners with small contributions would keep the shards busy."""
    calls = calls_of(asked, FRAGMENTS, every)
    contribution = asked.params / FRAGMENTS
    if calls <= LINK_SHARE * formulas.CALLS_PER_S or contribution > 1e6:
        return FRAGMENTS
    return max(4, min(FRAGMENTS, math.floor(FRAGMENTS * LINK_SHARE * formulas.CALLS_PER_S / calls)))


def _why_fragments(asked: PlannedRun, fragments: int) -> str:
    if fragments == FRAGMENTS:
        return f"the default: {units.count(asked.params / fragments)} parameters each"
    if fragments > FRAGMENTS:
        return "one for each shard"
    takes = f"a core of a shard takes {formulas.CALLS_PER_S:.0f} contributions a second"
    return f"fewer than {FRAGMENTS}, as {takes} (docs/performance.md)"


class _Machines(NamedTuple):
    """The number of shard machines needed, and what decides it."""

    most: float
    """The number needed if each is fully loaded."""
    why: str


def _machines(asked: PlannedRun, encodings: Encodings, every: int, fragments: int) -> _Machines:
    """The machines needed to make all versions."""
    push, pull = BITS[encodings.push], BITS[encodings.pull]
    calls = calls_of(asked, fragments, every)
    moved = formulas.bytes_rate(asked.params_moved, push, pull, asked.learners, every, asked.step_s)
    needs = [
        _Machines(
            calls / formulas.CALLS_PER_S,
            f"{units.count(calls)} contributions/s, and a core serves {formulas.CALLS_PER_S:g}",
        ),
        _Machines(moved / asked.merge, f"{units.size(moved)}/s, and a core serves {units.size(asked.merge)}/s"),
    ]
    if asked.shard_link is not None:
        busier = asked.learners * formulas.rate(asked.params_moved, max(push, pull), every, asked.step_s)
        why = f"{units.bit_rate(busier)} one way, and a shard's machine has {units.bit_rate(asked.shard_link)}"
        needs.append(_Machines(busier / asked.shard_link, why))
    if asked.disk is not None:
        written = formulas.disk_rate(asked.params, written_of(asked, encodings.pull), every, asked.step_s)
        why = f"{units.size(written)}/s of versions, and a disk writes {units.size(asked.disk)}/s"
        needs.append(_Machines(written / asked.disk, why))
    return max(needs)


def link_words(link: Link) -> str:
    """The link in words, such as "12.3 Mbit/s up, 45.6 Mbit/s down, 80 ms there and back"."""
    up, down = units.bit_rate(link.up), units.bit_rate(link.down)
    return f"{up} up, {down} down, {1000 * link.round_trip_s:g} ms there and back"
