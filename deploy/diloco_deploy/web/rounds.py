"""The rounds of all shards, as far back as the page draws them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    def row(self) -> list[Any]:
        """JSON: what a picture needs, without names. `static/rounds.js` reads it."""
        f = self.facts
        return [
            self.shard, f["fragment"], f["round"], round(self.opened_at, 2), f["quorum_s"], f["closed_s"],
            f["announced_s"], f["participants"], f["asked"], f["why"], f["late"], dict(f["refused"]),
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
        while len(self._rounds) > ROUNDS_MAX or next(iter(self._rounds.values())).opened_at < now - KEPT_S:
            self._rounds.popitem(last=False)
            if not self._rounds:
                return

    def cut(self, seq: int, shard: str, at: float) -> None:
        """A shard has not been heard since: what it had under way is not known to go on."""
        for key, drawn in list(self._rounds.items()):
            if drawn.shard == shard and drawn.facts["announced_s"] is None and drawn.cut_s is None:
                drawn.seq, drawn.cut_s = seq, max(0.0, at - drawn.opened_at)
                self._rounds.move_to_end(key)

    def since(self, seq: int) -> list[DrawnRound]:
        """Those that changed after a number."""
        newer = []
        for drawn in reversed(self._rounds.values()):
            if drawn.seq <= seq:
                break
            newer.append(drawn)
        return newer[::-1]
