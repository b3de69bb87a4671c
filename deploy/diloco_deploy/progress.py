"""How far a run is, and how long it still takes: the same for the terminal and the live page. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

PACE_S = 30.0
"""How far back the pace of a run is looked at."""
PACE_FROM_S = 4.0
"""Of a shorter time, the pace is a guess: "4:56:29 left" of a run of a minute."""

Status = Mapping[str, Any]
"""One answer of /status."""


def tokens_merged(shards: Iterable[Iterable[Status]]) -> int | None:
    """Progress of a run: the mean over all fragments of the model. None: no shard has said.

    `shards`: the answers of each shard, oldest first, those of earlier processes too. Of each the last one counts that
    lists fragments: while a shard that was started again reads its versions, it has none yet.
    """
    known = [answers for one in shards if (answers := list(one))]
    last = [next((a for a in reversed(one) if a.get("fragments")), one[-1]) for one in known]
    weights = [max(1, sum(not f.get("companion") for f in answer.get("fragments") or ())) for answer in last]
    if not last:
        return None
    merged = sum(w * int(a.get("tokens_merged") or 0) for w, a in zip(weights, last, strict=True))
    return round(merged / sum(weights))


class Pace:
    """The progress of the last half minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def heard(self, now: float, merged: int) -> None:
        """So many tokens are merged. The time before the first version says nothing of the pace."""
        if merged == 0:
            self._seen.clear()
        self._seen.append((now, merged))
        while now - self._seen[0][0] > PACE_S:
            self._seen.popleft()

    def left_s(self, budget: int) -> float | None:
        """Seconds until the budget is reached at this pace; None: there is no budget, or no pace yet."""
        if not budget or len(self._seen) < 2:
            return None
        (then, before), (last, merged) = self._seen[0], self._seen[-1]
        if merged <= before or last - then < PACE_FROM_S:
            return None
        return max(0, budget - merged) * (last - then) / (merged - before)
