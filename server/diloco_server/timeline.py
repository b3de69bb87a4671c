"""The last rounds and events of a shard, for those who draw them: /rounds serves what is new.

Pure: times come in, and ages go out. Every change of a round, and every event, takes the next number. Whoever has seen
all up to one of them asks for what came after it. Both are bounded; the oldest go first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_common.messages import Outcome
from diloco_server.core.effects import (
    ContributionAnswered,
    Fact,
    QuorumReached,
    RoundClosed,
    RoundOpened,
    VersionCommitted,
)

ROUNDS_MAX = 2048
"""Of all fragments together."""
EVENTS_MAX = 512
ANSWER_MAX = 512
"""Rounds of one answer. The next one goes on from there."""


@dataclass
class TracedRound:
    """One round, as far as it has come. Seconds count from its opening."""

    fragment_id: int
    round: int
    opened_at: float
    asked: int
    seq: int = 0
    """Of its last change."""
    quorum_s: float | None = None
    closed_s: float | None = None
    why: str = ""
    """Why it closed: all, grace or lease."""
    participants: int = 0
    announced_s: float | None = None
    """When its version was announced."""
    tokens: int = 0
    late: int = 0
    """Learners that it had asked and that were not there when it closed: those that /status counts as LATE."""
    refused: Counter[str] = field(default_factory=Counter)
    """Contributions to it that were refused, by code."""


class Timeline:
    """What happened on one shard in one epoch. Owned by its event loop."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._seq = 0  # grows; never reset within an epoch
        self._rounds: OrderedDict[tuple[int, int], TracedRound] = OrderedDict()  # in the order of their last change
        self._events: deque[tuple[int, float, Mapping[str, Any]]] = deque(maxlen=EVENTS_MAX)

    def note(self, fact: Fact, now: float) -> None:
        """Something happened in a round; other facts change nothing."""
        match fact:
            case ContributionAnswered(header=header, answer=answer) if answer.outcome is Outcome.REJECTED:
                if (traced := self._changed(header.fragment_id, header.round)) is not None:
                    traced.refused[answer.code] += 1
            case RoundOpened():
                self._rounds[fact.fragment_id, fact.round] = TracedRound(fact.fragment_id, fact.round, now, fact.asked)
                self._changed(fact.fragment_id, fact.round)
            case QuorumReached():
                if (traced := self._changed(fact.fragment_id, fact.round)) is not None:
                    traced.quorum_s = fact.after_s
            case RoundClosed():
                if (traced := self._changed(fact.fragment_id, fact.round)) is not None:
                    traced.closed_s, traced.why = fact.open_s, fact.why.value
                    traced.participants, traced.asked, traced.late = fact.participants, fact.asked, fact.late
            case VersionCommitted():
                if (traced := self._changed(fact.fragment_id, fact.version)) is not None:
                    traced.announced_s, traced.tokens = fact.round_s, fact.tokens
            case _:
                pass

    def event(self, facts: Mapping[str, Any], now: float) -> None:
        """Something that people want to hear of."""
        self._seq += 1
        self._events.append((self._seq, now, facts))

    def since(self, epoch: int, seq: int, now: float) -> dict[str, Any]:
        """What is newer than a number of an epoch, oldest first, at most `ANSWER_MAX` rounds. JSON; ages in seconds.

        Another epoch than this one: everything. `seq` of the answer is the number to ask with next time.
        """
        after = seq if epoch == self._epoch else 0
        newer: list[TracedRound] = []
        for traced in reversed(self._rounds.values()):
            if traced.seq <= after:
                break
            newer.append(traced)
        newer.reverse()
        shown = newer[:ANSWER_MAX]
        upto = shown[-1].seq if len(shown) < len(newer) else self._seq
        return {
            "epoch": self._epoch,
            "seq": upto,
            "rounds": [_round(traced, now) for traced in shown],
            "events": [
                {"ago_s": round(now - at, 3), **facts} for number, at, facts in self._events if after < number <= upto
            ],
        }

    def _changed(self, fragment_id: int, number: int) -> TracedRound | None:
        """The round, as the newest. None: it is too old, or of another epoch."""
        traced = self._rounds.get((fragment_id, number))
        if traced is None:
            return None
        self._seq += 1
        traced.seq = self._seq
        self._rounds.move_to_end((fragment_id, number))
        if len(self._rounds) > ROUNDS_MAX:
            self._rounds.popitem(last=False)
        return traced


def _round(traced: TracedRound, now: float) -> dict[str, Any]:
    return {
        "fragment": traced.fragment_id,
        "round": traced.round,
        "ago_s": round(now - traced.opened_at, 3),
        "asked": traced.asked,
        "quorum_s": _rounded(traced.quorum_s),
        "closed_s": _rounded(traced.closed_s),
        "why": traced.why,
        "participants": traced.participants,
        "announced_s": _rounded(traced.announced_s),
        "tokens": traced.tokens,
        "late": traced.late,
        "refused": dict(traced.refused),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
