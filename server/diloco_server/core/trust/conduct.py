"""Learners whose contributions are outliers again and again: for a while nobody asks them, and nobody waits for them.

The last contributions of a learner are its votes, one per round that waited for it: an outlier was refused or left out
because of its values. Where norms tell nothing, only what was refused votes. Everything is relative to the other
learners, so at most half of them can be left out: beyond that nobody can say who is the outlier.

All of it goes by the learner's id. A learner that leaves, joins again, or starts as another process is the same one.
After each time the learner is on probation: it is treated as a stranger, fewer outliers suffice, and it is left out for
longer. As many ordinary contributions as there are votes clear it. Kept in memory only: a restarted shard begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median_low

from diloco_common.errors import NormTooLarge, NotFinite
from diloco_server.core.round import Contribution

VOTES = 16
"""Contributions of a learner that are remembered."""
OUTLIERS = 8
"""Outliers among them that put it into quarantine. A learner that pushes 24 fragments for the first time after it was
cut off, or meets rows of an embedding that nobody met, has fewer."""
OUTLIERS_ON_PROBATION = 2
OUTLIER_FACTOR = 8.0
"""A contribution is an outlier if its norm is above this many times the usual one. 99 % of honest ones of equal speed
are below 1.6 times the median of their round."""
LEARNERS_MIN = 3
"""Contributions to a round that it takes to call one of them an outlier."""
LONGEST = 10
"""Quarantine doubles from time to time, up to this many times the first."""
CODES = (NotFinite.code, NormTooLarge.code)
"""Refusals that are evidence: they are about the values. Others are about versions, rounds and bytes on the way."""


@dataclass
class Conduct:
    votes: deque[bool] = field(default_factory=lambda: deque(maxlen=VOTES))
    """True: an outlier. Oldest first."""
    why: str = ""
    """The last evidence: the code of a refusal, or words."""
    times: int = 0
    """In quarantine, since it was last cleared. Above 0 and not in quarantine: on probation."""
    until: float | None = None
    """In the shard's time; None: not in quarantine."""

    @property
    def outliers(self) -> int:
        return sum(self.votes)


class Quarantine:
    """The learners of one shard that are left out, and those that may be."""

    def __init__(self, first_s: float) -> None:
        """`first_s`: how long the first quarantine of a learner lasts; 0: there is none."""
        self._first_s = first_s
        self._known: dict[str, Conduct] = {}

    def vote(self, learner_id: str, evidence: str, now: float, live: Collection[str]) -> float | None:
        """A contribution of one of the `live` learners was looked at; `evidence` against it, or "".

        Returns for how many seconds the learner is left out from now on, if that begins now.
        """
        if not self._first_s or self.holds(learner_id):
            return None
        conduct = self._known.setdefault(learner_id, Conduct())
        conduct.votes.append(bool(evidence))
        conduct.why = evidence or conduct.why
        if len(conduct.votes) == VOTES and not conduct.outliers:
            del self._known[learner_id]  # nothing is held against it any more
            return None
        enough = OUTLIERS_ON_PROBATION if conduct.times else OUTLIERS
        left_out = sum(self.holds(one) for one in live)
        if conduct.outliers < enough or 2 * (left_out + 1) > len(live):
            return None
        for_s: float = self._first_s * min(2**conduct.times, LONGEST)
        conduct.times, conduct.until = min(conduct.times + 1, LONGEST), now + for_s
        return for_s

    def release(self, now: float) -> list[str]:
        """Time passes. Returns the learners whose quarantine is over; they are on probation."""
        over = [i for i, conduct in self._known.items() if conduct.until is not None and conduct.until <= now]
        for learner_id in over:
            self._known[learner_id].until = None
            self._known[learner_id].votes.clear()
        return sorted(over)

    def forget(self, learner_id: str) -> None:
        """The learner has been gone for long: what it did is forgotten, unless it is in quarantine."""
        if not self.holds(learner_id):
            self._known.pop(learner_id, None)

    def suspects(self, learner_id: str) -> bool:
        """Whether the learner was in quarantine, and is not cleared yet."""
        conduct = self._known.get(learner_id)
        return conduct is not None and conduct.times > 0

    def holds(self, learner_id: str) -> bool:
        conduct = self._known.get(learner_id)
        return conduct is not None and conduct.until is not None

    def conduct(self, learner_id: str) -> Conduct:
        """What is known of a learner; changes nothing."""
        return self._known.get(learner_id) or Conduct()


def far_off(contributions: Mapping[str, Contribution], typical_norm: float) -> dict[str, str]:
    """The evidence against each contribution to a closed round; "" for most.

    A norm is compared with the median of the round, and with what is usual for the fragment where that is more. Whoever
    took more steps than the others may be that much longer: it was cut off, and brings all its work at once.
    """
    if len(contributions) < LEARNERS_MIN:
        return dict.fromkeys(contributions, "")
    usual = max(median_low([c.norm for c in contributions.values()]), typical_norm)
    steps = median_low([c.steps for c in contributions.values()])
    evidence = {}
    for learner_id, c in contributions.items():
        times = c.norm / usual
        is_far = times > OUTLIER_FACTOR * max(1.0, c.steps / steps)
        evidence[learner_id] = f"a norm {times:.3g} times the usual one" if is_far else ""
    return evidence
