"""What the page draws over time, in a bounded number: the course of the run, its rounds, what happened. Pure."""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from statistics import fmean, variance
from typing import Any

POINTS_MAX = 720
FIRST_EVERY_S = 1.0
SPANS_S = (60.0, 600.0, 7200.0)
"""Where the loss goes is said of the shortest of these spans in which it can be told from its scatter."""


@dataclass(frozen=True)
class Point:
    """The run at one moment."""

    seq: int
    at: float
    """Seconds since 1970."""
    tokens_merged: int
    loss: float | None
    """Mean over the learners that are there and report one; None also while no shard answers: a gap."""
    loss_min: float | None = None
    loss_max: float | None = None
    learners: int = 0
    """With a lease."""
    tokens_per_s: float = 0.0

    def row(self) -> list[float | None]:
        """JSON. `static/course.js` reads it."""
        return [
            self.at, self.tokens_merged, self.loss, self.loss_min, self.loss_max, self.learners, self.tokens_per_s,
        ]  # fmt: skip


@dataclass(frozen=True)
class Trend:
    """How the loss has moved."""

    change: float
    noise: float
    """Standard error of the change, from how the points scatter."""
    over_s: float


class Course:
    """Points at a steady pace. When there are too many, every second one goes, and the pace halves."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.thinned_seq = 0
        """Number of the change in which points went: whoever knows less gets the whole course."""
        self._every_s = FIRST_EVERY_S

    def is_due(self, now: float) -> bool:
        return not self.points or now - self.points[-1].at >= 0.95 * self._every_s

    def add(self, point: Point) -> None:
        self.points.append(point)
        if len(self.points) > POINTS_MAX:
            self.points = self.points[::2]
            self._every_s *= 2
            self.thinned_seq = point.seq

    def since(self, seq: int) -> tuple[bool, list[Point]]:
        """Whether the points are the whole course, and the points that came after a change."""
        if seq < self.thinned_seq:
            return True, self.points
        return seq == 0, [*takewhile(lambda point: point.seq > seq, reversed(self.points))][::-1]

    def trends(self, spans_s: Iterable[float]) -> list[Trend]:
        """Of the spans of which the course holds enough."""
        return [trend for over_s in spans_s if (trend := self.trend(over_s)) is not None]

    def trend(self, over_s: float) -> Trend | None:
        """How the loss has moved: the newest third of a span against its oldest third.

        None: the course holds too little to say.
        """
        if not self.points:
            return None
        begin = self.points[-1].at - over_s
        known = [(p.at, p.loss) for p in self.points if p.loss is not None and p.at >= begin]
        third = len(known) // 3
        if third < 3:
            return None
        old, new = ([loss for _, loss in part] for part in (known[:third], known[-third:]))
        noise = math.sqrt((variance(old) + variance(new)) / third)
        return Trend(fmean(new) - fmean(old), noise, known[-1][0] - known[0][0])


ROUNDS_MAX = 3000
KEPT_S = 900.0


@dataclass
class DrawnRound:
    """A round of one fragment, and when this page heard of a change in it."""

    seq: int
    shard: str
    opened_at: float
    """Seconds since 1970, by the clock of the page's server."""
    facts: Mapping[str, Any]
    """As `diloco_server/shell/status.py` tells them."""
    cut_s: float | None = None
    """When its shard fell silent, if it had not become a version by then: nobody knows how it went on."""

    @property
    def is_open(self) -> bool:
        """It may still become a version: it is drawn, however old it is."""
        return self.facts["announced_s"] is None and self.cut_s is None

    def row(self) -> list[Any]:
        """JSON: what a picture needs, without names. `static/rounds.js` reads it."""
        f = self.facts
        return [
            self.shard, f["fragment"], f["round"], round(self.opened_at, 2), f["quorum_s"], f["closed_s"],
            f["announced_s"], f["participants"], f["asked"], f["why"], f["absent"], dict(f["refused"]),
            None if self.cut_s is None else round(self.cut_s, 2),
        ]  # fmt: skip


class DrawnRounds:
    """Bounded in number and age; the oldest go first."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[tuple[str, int, int, int], DrawnRound] = OrderedDict()  # by their last change

    def heard(self, seq: int, shard: str, epoch: int, facts: Mapping[str, Any], now: float) -> None:
        """A shard told of a round, for the first time or again. Raises KeyError where a fact is missing."""
        key = (shard, epoch, int(facts["fragment"]), int(facts["round"]))
        opened_at = now - float(facts["ago_s"])
        old = self._rounds.get(key)
        if old is not None and abs(old.opened_at - opened_at) < 1.0:  # else the same round has opened once more
            opened_at = old.opened_at
        self._rounds[key] = DrawnRound(seq, shard, opened_at, facts)
        self._rounds.move_to_end(key)
        while len(self._rounds) > ROUNDS_MAX:
            self._rounds.popitem(last=False)
        for old_key, drawn in list(self._rounds.items()):
            if drawn.opened_at >= now - KEPT_S:
                break
            if not drawn.is_open:
                del self._rounds[old_key]

    def cut(self, seq: int, shard: str, at: float) -> None:
        """A shard has not been heard since: what it had under way is not known to go on."""
        for key, drawn in list(self._rounds.items()):
            if drawn.shard == shard and drawn.facts["announced_s"] is None and drawn.cut_s is None:
                drawn.seq, drawn.cut_s = seq, max(0.0, at - drawn.opened_at)
                self._rounds.move_to_end(key)

    def since(self, seq: int) -> list[DrawnRound]:
        """Those that changed after a number."""
        return [*takewhile(lambda drawn: drawn.seq > seq, reversed(self._rounds.values()))][::-1]


EVENTS_MAX = 200
TOGETHER_S = 3.0
"""Two hundred learners that join at once are one event."""
SAME_S = 1.0
"""The time of an event is computed from its age, so it varies a little."""
NAMES_MAX = 3
LEARNERS_MAX = 10_000
"""Of one event."""

# event of a shard -> (level, words for one learner, words for many)
_OF_LEARNERS = {
    "joined": ("info", "joined", "joined"),
    "returned": ("good", "came back", "came back"),
    "left": ("info", "said goodbye", "said goodbye"),
    "replaced": ("info", "was replaced by a new process of its own", "were replaced by new processes of their own"),
    "evicted": ("bad", "fell silent; its lease ended", "fell silent; their leases ended"),
    "left out": ("bad", "is left out: it points away, or repeats itself", "are left out"),
    "takes part again": ("good", "takes part again", "take part again"),
}
_BY_CODE = {
    "STALLED": ("bad", "was there but ended no step; its lease ended", "were there but ended no step; leases ended"),
    "REVOKED": ("bad", "was revoked", "were revoked"),
}


@dataclass
class EventLine:
    """One line of the list."""

    number: int
    """Its own among all events of a page."""
    seq: int
    at: float
    """Seconds since 1970; of the first, where several are told together."""
    kind: str
    level: str
    """"good", "info" or "bad"."""
    code: str = ""
    words: str = ""
    """Of an event that is of no learner."""
    shards: dict[str, None] = field(default_factory=dict)
    learners: dict[str, None] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """JSON."""
        return {
            "id": self.number, "at": round(self.at, 2), "kind": self.kind, "level": self.level,
            "words": self.words or self._of_learners(), "shards": list(self.shards),
        }  # fmt: skip

    def _of_learners(self) -> str:
        one, many = (_BY_CODE.get(self.code) or _OF_LEARNERS[self.kind])[1:]
        names, more = list(self.learners)[:NAMES_MAX], len(self.learners) - NAMES_MAX
        who = ", ".join(names) + (f" and {more} more" if more > 0 else "")
        return f"{who} {one if len(self.learners) == 1 else many}"


class Events:
    """The last events by the time when they happened, oldest first.

    A shard that was cut off tells again what it told before: what came late must not push out what happened last.
    """

    def __init__(self) -> None:
        self._events: list[EventLine] = []
        self._numbers = count(1)

    def heard(self, seq: int, shard: str, facts: Mapping[str, Any], now: float) -> None:
        """A shard told of an event. Kinds that this page does not know are told as they came."""
        kind, code = str(facts.get("event", "")), str(facts.get("code") or "")
        at = now - max(0.0, float(facts.get("ago_s", 0)))  # nothing happened after now
        if kind not in _OF_LEARNERS:
            level = "bad" if kind == "versions lost" else "info"
            self.say(seq, at, kind, level, _words_of(shard, kind, facts), shard)
            return
        learner = str(facts.get("learner", "somebody"))
        event = self._together(kind, code, at)
        if event is None:
            level = (_BY_CODE.get(code) or _OF_LEARNERS[kind])[0]
            event = EventLine(next(self._numbers), seq, at, kind, level, code)
            if not self._add(event):
                return
        event.seq = seq
        event.shards[shard] = None
        if len(event.learners) < LEARNERS_MAX:
            event.learners[learner] = None

    def say(self, seq: int, at: float, kind: str, level: str, words: str, shard: str = "") -> None:
        """Something that is of no learner. A shard that was cut off tells again what it told before."""
        if any((old.kind, old.words) == (kind, words) and abs(old.at - at) < SAME_S for old in self._events):
            return
        self._add(EventLine(next(self._numbers), seq, at, kind, level, "", words, {shard: None} if shard else {}))

    def since(self, seq: int) -> list[EventLine]:
        """Those that changed after a number."""
        return [event for event in self._events if event.seq > seq]

    def _add(self, event: EventLine) -> bool:
        """Whether it is kept: it is older than all that are, and there is no room for more."""
        if len(self._events) >= EVENTS_MAX:
            if event.at < self._events[0].at:
                return False
            del self._events[0]
        insort(self._events, event, key=lambda one: one.at)
        return True

    def _together(self, kind: str, code: str, at: float) -> EventLine | None:
        alike = (one for one in reversed(self._events) if (one.kind, one.code) == (kind, code))
        return next((one for one in alike if abs(one.at - at) <= TOGETHER_S), None)


def _words_of(shard: str, kind: str, facts: Mapping[str, Any]) -> str:
    if kind == "versions lost":
        return (
            f"{shard} came back with version {facts.get('recovered')} of fragment {facts.get('fragment')}, "
            f"but {facts.get('learner')} holds version {facts.get('seen')}"
        )
    if kind.startswith("same losses"):
        return f"{facts.get('learner')} and {facts.get('other')} report the same losses: the same batches?"
    if kind == "budget reached":
        return f"{shard} has reached the token budget"
    if kind == "sync_every changed":
        return f"{shard} has set H from {facts.get('before')} to {facts.get('every')}: {facts.get('why')}"
    return f"{shard}: {kind}"
