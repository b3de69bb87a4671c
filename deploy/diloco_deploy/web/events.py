"""What happened, in words. Events of one kind that come together are told together. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

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
    "quarantined": ("bad", "is left out for a while: outliers", "are left out for a while: outliers"),
    "released": ("good", "takes part again", "take part again"),
}
_BY_CODE = {
    "STALLED": ("bad", "was there but ended no step; its lease ended", "were there but ended no step; leases ended"),
    "REVOKED": ("bad", "was revoked", "were revoked"),
}


@dataclass
class Event:
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
            "id": self.number,
            "at": round(self.at, 2),
            "kind": self.kind,
            "level": self.level,
            "words": self.words or self._of_learners(),
            "shards": list(self.shards),
        }

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
        self._events: list[Event] = []
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
            event = Event(next(self._numbers), seq, at, kind, level, code)
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
        self._add(Event(next(self._numbers), seq, at, kind, level, "", words, {shard: None} if shard else {}))

    def since(self, seq: int) -> list[Event]:
        """Those that changed after a number."""
        return [event for event in self._events if event.seq > seq]

    def _add(self, event: Event) -> bool:
        """Whether it is kept: it is older than all that are, and there is no room for more."""
        if len(self._events) >= EVENTS_MAX:
            if event.at < self._events[0].at:
                return False
            del self._events[0]
        insort(self._events, event, key=lambda one: one.at)
        return True

    def _together(self, kind: str, code: str, at: float) -> Event | None:
        for event in reversed(self._events):
            if (event.kind, event.code) == (kind, code) and abs(event.at - at) <= TOGETHER_S:
                return event
        return None


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
    return f"{shard}: {kind}"
