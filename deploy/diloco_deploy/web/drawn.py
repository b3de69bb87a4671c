"""What the page draws over time, in limited numbers: the run's course, its rounds, and events. Pure."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

from diloco_common.errors import some
from diloco_deploy import ASK_S, EVERY_S
from diloco_deploy.cluster.members import KEPT_S, LEARNERS_MAX, SAME_S

POINTS_MAX = 720
"""Points of a curve, as many as a wide screen shows; more are thinned out."""


@dataclass(frozen=True)
class Point:
    seq: int
    at: float
    """Seconds since 1970."""
    tokens_merged: int
    loss: float | None
    """Mean over present learners that report one; None also while no shard answers, which draws a gap."""
    loss_min: float | None = None
    loss_max: float | None = None
    learners: int = 0
    """Learners with a lease."""
    tokens_per_s: float = 0.0

    def row(self) -> list[float | None]:
        """The point as JSON, for `static/course.js`."""
        return [
            self.at, self.tokens_merged, self.loss, self.loss_min, self.loss_max, self.learners, self.tokens_per_s,
        ]  # fmt: skip


class Course:
    """Points at a steady pace. When there are too many, every second one is dropped and the pace halves."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.thinned_seq = 0
        """Number of the change that last dropped points: viewers with an older number get the whole course."""
        self._every_s = EVERY_S

    def is_due(self, now: float) -> bool:
        return not self.points or now - self.points[-1].at >= 0.95 * self._every_s

    def add(self, point: Point) -> None:
        self.points.append(point)
        if len(self.points) > POINTS_MAX:
            self.points = self.points[::2]
            self._every_s *= 2
            self.thinned_seq = point.seq

    def since(self, seq: int) -> tuple[bool, list[Point]]:
        """Points after number `seq`, and whether they are the whole course."""
        if seq < self.thinned_seq:
            return True, self.points
        return seq == 0, [*takewhile(lambda point: point.seq > seq, reversed(self.points))][::-1]


ROUNDS_MAX = 3000
"""Rounds that are remembered; the oldest are dropped."""


@dataclass
class DrawnRound:
    """A round of one fragment, and the number of its last change."""

    seq: int
    shard: str
    opened_at: float
    """Seconds since 1970, by the clock of the page's server."""
    facts: Mapping[str, Any]
    """As reported by `diloco_server/shell/status.py`."""
    cut_s: float | None = None
    """When its shard stopped answering, if the round had not become a version: its end is unknown."""

    @property
    def is_open(self) -> bool:
        """Whether it may still become a version: then it is drawn, however old it is."""
        return self.facts["announced_s"] is None and self.cut_s is None

    def row(self) -> list[Any]:
        """The round as JSON, without names, for `static/rounds.js`."""
        f = self.facts
        return [
            self.shard, f["fragment"], f["round"], round(self.opened_at, 2), f["quorum_s"], f["closed_s"],
            f["announced_s"], f["participants"], f["asked"], f["why"], f["absent"], dict(f["refused"]),
            None if self.cut_s is None else round(self.cut_s, 2),
        ]  # fmt: skip


class DrawnRounds:
    """Rounds, bounded in number and age; the oldest are dropped."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[tuple[str, int, int, int], DrawnRound] = OrderedDict()  # ordered by their last change

    def heard(self, seq: int, shard: str, epoch: int, facts: Mapping[str, Any], now: float) -> None:
        """Take a shard's report of a round. Raises KeyError if a fact is missing."""
        key = (shard, epoch, int(facts["fragment"]), int(facts["round"]))
        opened_at = now - float(facts["ago_s"])
        old = self._rounds.get(key)
        if old is not None and abs(old.opened_at - opened_at) < 1.0:  # otherwise the round has opened again
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
        """A shard stopped answering: the end of its unfinished rounds is unknown."""
        for key, drawn in list(self._rounds.items()):
            if drawn.shard == shard and drawn.facts["announced_s"] is None and drawn.cut_s is None:
                drawn.seq, drawn.cut_s = seq, max(0.0, at - drawn.opened_at)
                self._rounds.move_to_end(key)

    def since(self, seq: int) -> list[DrawnRound]:
        return [*takewhile(lambda drawn: drawn.seq > seq, reversed(self._rounds.values()))][::-1]


EVENTS_MAX = 200
"""Events that are listed; the page keeps as many (static/state.js)."""

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
    "REVOKED": ("bad", "was revoked", "were revoked"),
}


@dataclass
class EventLine:
    number: int
    """Unique among all events of a page."""
    seq: int
    at: float
    """Seconds since 1970; of the first, if several are shown together."""
    kind: str
    level: str
    code: str = ""
    words: str = ""
    """The text of an event that concerns no learner."""
    shards: dict[str, None] = field(default_factory=dict)
    learners: dict[str, None] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        return {
            "id": self.number, "at": round(self.at, 2), "kind": self.kind, "level": self.level,
            "words": self.words or self._of_learners(), "shards": list(self.shards),
        }  # fmt: skip

    def _of_learners(self) -> str:
        one, many = (_BY_CODE.get(self.code) or _OF_LEARNERS[self.kind])[1:]
        return f"{some([*self.learners])} {one if len(self.learners) == 1 else many}"


class Events:
    """The last events, in order of their time, oldest first.

    A shard that was cut off repeats old events; these must not displace the newest.
    """

    def __init__(self) -> None:
        self._events: list[EventLine] = []
        self._numbers = count(1)

    def heard(self, seq: int, shard: str, facts: Mapping[str, Any], now: float) -> None:
        """Take a shard's event. Unknown kinds are shown as they are."""
        kind, code = str(facts.get("event", "")), str(facts.get("code") or "")
        at = now - max(0.0, float(facts.get("ago_s", 0)))  # not later than now
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
        """Add an event that concerns no learner, unless a shard repeats it."""
        if any((old.kind, old.words) == (kind, words) and abs(old.at - at) < SAME_S for old in self._events):
            return
        self._add(EventLine(next(self._numbers), seq, at, kind, level, "", words, {shard: None} if shard else {}))

    def since(self, seq: int) -> list[EventLine]:
        return [event for event in self._events if event.seq > seq]

    def _add(self, event: EventLine) -> bool:
        """Insert an event. Returns False if it is older than all others and there is no room."""
        if len(self._events) >= EVENTS_MAX:
            if event.at < self._events[0].at:
                return False
            del self._events[0]
        insort(self._events, event, key=lambda one: one.at)
        return True

    def _together(self, kind: str, code: str, at: float) -> EventLine | None:
        """The event to show it with: two hundred learners may join at once, and reach one shard after the other."""
        alike = (one for one in reversed(self._events) if (one.kind, one.code) == (kind, code))
        return next((one for one in alike if abs(one.at - at) <= ASK_S), None)


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
