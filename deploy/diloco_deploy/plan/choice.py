"""Which settings suit a link and a number of learners, and why. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from diloco_deploy import units
from diloco_deploy.plan import formulas
from diloco_deploy.plan.formulas import BITS

LINK_SHARE = 0.5
"""Of a link, or of a core, or of a disk, that the run may take on average: the rest is for bursts and repeats."""
EVERY, EVERY_MOST = 24, 500
"""H: the default, and the largest that is proposed before a smaller encoding. Quality was measured up to 48."""
FRAGMENTS = 24
PATIENCE, OVERLAP = 0.1, 2
"""Defaults of `sync.patience` and `sync.overlap_steps`."""


class Encodings(NamedTuple):
    """Of contributions and of versions, and what is known of their price."""

    push: str
    pull: str
    price: str


LADDER = (
    Encodings("int8", "bfloat16", "the defaults"),
    Encodings("int4", "int8", "half of the bytes; half a percent of the loss at 80 versions (docs/quality.md)"),
    Encodings("topk64_2bit", "int4", "a fifth of the bytes; the loss was 13 % higher (docs/quality.md)"),
)  # fmt: skip
"""From the careful to the last resort."""


@dataclass(frozen=True)
class Link:
    """Between one learner and the shards."""

    up: float
    """Bits per second towards the shards."""
    down: float
    round_trip_s: float = 0.0


@dataclass(frozen=True)
class Asked:
    """What a plan is made for."""

    params: float
    learners: int
    link: Link
    step_s: float
    fragments: int | None = None
    """P, if it is given."""
    shards: int | None = None
    outer: str = "nesterov"
    shard_link: float | None = None
    """Bits per second of a shard's machine, each way."""
    disk: float | None = None
    """Bytes per second that the disk of a shard's machine writes."""
    companions_every: int | None = None
    """`sync.companions_every` of a run that averages momentum; None: it does not."""
    merge: float = formulas.BYTES_PER_S
    """Payload bytes per second that a shard's machine receives, merges and sends."""

    @property
    def companions_share(self) -> float:
        """What companions add to the contributions of the model, and to their bytes: all again, so many times as
        rarely."""
        return 1 / self.companions_every if self.companions_every else 0.0

    @property
    def params_moved(self) -> float:
        """In H steps, to and from each learner: N, and what companions add."""
        return self.params * (1 + self.companions_share)


@dataclass(frozen=True)
class Choice:
    """The settings, and a reason for each."""

    encodings: Encodings
    every: int
    fragments: int
    shards: int
    fits: bool
    """Whether the link carries it at all."""
    keeps_up: bool
    """Whether so many shards can make all versions, at full load."""
    why_encodings: str
    why_every: str
    why_fragments: str
    why_shards: str

    @property
    def works(self) -> bool:
        return self.fits and self.keeps_up


def choose(asked: Asked) -> Choice:
    """The most careful settings that the link carries."""
    encodings, every, fits, why = _encodings(asked)
    fragments = asked.fragments or _fragments(asked, every)
    push_s = asked.params / fragments * BITS[encodings.push] / asked.link.up + asked.link.round_trip_s
    for_rounds = formulas.every_for_patience(push_s, PATIENCE, OVERLAP, asked.step_s)
    why_every = why
    if for_rounds > every:
        every = for_rounds
        why_every = (
            f"a push takes {push_s:.2g} s, and a round waits for {PATIENCE:g} H steps of {asked.step_s:g} s at most"
        )
    shards = shards_of(asked, encodings, every, fragments)
    return Choice(
        encodings, every, fragments, shards.count, fits, shards.keep_up,
        why_encodings=encodings.price,
        why_every=why_every,
        why_fragments="given" if asked.fragments else _why_fragments(asked, fragments),
        why_shards=shards.why,
    )  # fmt: skip


def calls_of(asked: Asked, fragments: int, every: int) -> float:
    """Contributions per second, of all learners, those to companions included."""
    return formulas.calls_rate(asked.learners, fragments, every, asked.step_s) * (1 + asked.companions_share)


def written_of(asked: Asked, pull: str) -> float:
    """Bytes per parameter of the model that a shard writes in H steps, those of companions included."""
    return formulas.version_bytes(asked.outer, pull) + formulas.companion_bytes(pull) * asked.companions_share


def needed_every(params: float, encodings: Encodings, link: Link, step_s: float) -> int:
    """The smallest H with which half of the link is enough in both directions."""
    up = formulas.every_for_rate(params, BITS[encodings.push], link.up, step_s, LINK_SHARE)
    down = formulas.every_for_rate(params, BITS[encodings.pull], link.down, step_s, LINK_SHARE)
    return max(up, down)


def _encodings(asked: Asked) -> tuple[Encodings, int, bool, str]:
    """The encodings, H, whether the link carries them, and why this H."""
    careful, half, last = LADDER
    if needed_every(asked.params_moved, careful, asked.link, asked.step_s) <= EVERY:
        return careful, EVERY, True, "the default, and the link carries it"
    for rung in (half, last):
        every = max(EVERY, needed_every(asked.params_moved, rung, asked.link, asked.step_s))
        if every <= EVERY_MOST:
            return (
                rung,
                every,
                True,
                "the default, and the link carries it" if every == EVERY else _link_asks(asked, every),
            )
    return last, every, False, _link_asks(asked, every)


def _link_asks(asked: Asked, every: int) -> str:
    cost = "the loss was 3 % higher at 48" if every <= 48 else "its price beyond 48 was not measured"
    return (
        f"the smallest with which half of the link is enough at {asked.step_s:g} s per step; {cost} (docs/quality.md)"
    )


def _fragments(asked: Asked, every: int) -> int:
    """24, and fewer where small contributions of many learners would keep the shards busy with calls alone."""
    calls = calls_of(asked, FRAGMENTS, every)
    contribution = asked.params / FRAGMENTS
    if calls <= LINK_SHARE * formulas.CALLS_PER_S or contribution > 1e6:
        return FRAGMENTS
    return max(4, min(FRAGMENTS, math.floor(FRAGMENTS * LINK_SHARE * formulas.CALLS_PER_S / calls)))


def _why_fragments(asked: Asked, fragments: int) -> str:
    if fragments == FRAGMENTS:
        return f"the default: {units.count(asked.params / fragments)} parameters each"
    return "fewer than 24, as each contribution costs a shard 1.6 ms however small it is (docs/performance.md)"


@dataclass(frozen=True)
class Shards:
    """How many, and what decides it."""

    count: int
    keep_up: bool
    why: str


def shards_of(asked: Asked, encodings: Encodings, every: int, fragments: int) -> Shards:
    """So many as are given, or as leave half of each machine for bursts."""
    push, pull = BITS[encodings.push], BITS[encodings.pull]
    calls = calls_of(asked, fragments, every)
    moved = formulas.bytes_rate(asked.params_moved, push, pull, asked.learners, every, asked.step_s)
    needs = {
        f"{units.count(calls)} contributions/s, and a core serves {formulas.CALLS_PER_S:g}": calls
        / formulas.CALLS_PER_S,
        f"{units.size(moved)}/s, and a core serves {units.size(asked.merge)}/s": moved / asked.merge,
    }
    if asked.shard_link is not None:
        busier = asked.learners * formulas.rate(asked.params_moved, max(push, pull), every, asked.step_s)
        needs[f"{bit_rate(busier)} one way, and a shard's machine has {bit_rate(asked.shard_link)}"] = (
            busier / asked.shard_link
        )
    if asked.disk is not None:
        written = formulas.disk_rate(asked.params, written_of(asked, encodings.pull), every, asked.step_s)
        needs[f"{units.size(written)}/s of versions, and a disk writes {units.size(asked.disk)}/s"] = (
            written / asked.disk
        )
    why, most = max(needs.items(), key=lambda need: need[1])
    enough = max(1, math.ceil(most / LINK_SHARE))
    if asked.shards is None:
        return Shards(enough, True, f"{why}, of which half is used")
    if asked.shards < most:
        return Shards(asked.shards, False, f"given, and too few: {why}; ask for {enough}")
    return Shards(asked.shards, True, "given")


def bit_rate(bits_per_s: float) -> str:
    """12345678 -> "12.3 Mbit/s"."""
    return f"{units.size(bits_per_s).removesuffix('B')}bit/s"
