"""H where `sync.sync_every` is "auto": the smallest that the link, the shard and the steps carry with room to spare.

Each shard decides it for its own fragments, by its own clock. In H steps every fragment goes round once: it is asked
for, pushed, merged, and its version is pulled. Each of these has to fit in half of that time, pulls in three quarters,
because they mostly wait for messages:

    push     the usual learner pushes the whole model: one link for all shards
    pull     it pulls every version of this shard, one after the other, as learners do
    shard    the shard merges and publishes all its fragments
    round    one fragment goes round, all waiting included

And if more than 2 % of what was asked comes late, H is too small, whatever the reason. A learner contributes to a
fragment again once it has pulled the version before; where versions wait in line, it comes late to the round after.

H at most doubles in one change. It falls by a quarter at most, and only after it has been larger than needed several
times in a row. How many times doubles whenever a fall turns out to have been too far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco_common.settings import EVERY_LEAST, EVERY_MOST, SyncSettings

ROOM, PULL_ROOM = 0.5, 0.75
"""Of H steps: what a part of the way may take."""
LATE = 0.02
"""Of what was asked."""
ASKED = 64
"""Contributions that a share is known from."""
STEP = 0.25
"""H changes by no less, and falls by no more."""
QUIET, QUIET_MOST = 2, 64
"""Looks in a row that ask for less, before H falls."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a shard knows, in seconds; 0: not known. Each but the first has to fit in H steps."""

    step_s: float
    """Of the usual learner."""
    push_s: float = 0.0
    pull_s: float = 0.0
    shard_s: float = 0.0
    round_s: float = 0.0


def carried(measured: Measured) -> int:
    """The smallest H that carries this with room to spare."""
    half_s = max(measured.push_s, measured.shard_s, measured.round_s) / ROOM
    return max(1, math.ceil(max(half_s, measured.pull_s / PULL_ROOM) / measured.step_s))


def following(every: int, carries: int, late: float, least: int, most: int, *, may_fall: bool) -> int:
    """The next H. `late`: the share of what was asked. `least`, `most`: as the user bounds it."""
    wanted = every
    if late > LATE:
        wanted = 2 * every
    elif carries > every * (1 + STEP) or (carries <= every * (1 - STEP) and may_fall):
        wanted = min(max(carries, math.ceil(every * (1 - STEP))), 2 * every)
    return min(max(wanted, least), most)


class Every:
    """H of one shard, as it is now."""

    def __init__(self, sync: SyncSettings) -> None:
        self.steps = sync.first_every
        self.announced_at: dict[int, float] = {}
        """Fragment -> when its latest version was."""
        self._is_auto = sync.sync_every == "auto"
        self._rounds = self._asked = self._late = 0  # since it was looked at last
        self._settles = True  # these rounds were opened before H was what it is
        self._quiet, self._patience, self._fell = 0, QUIET, False

    def closed(self, contributions: int, late: int) -> None:
        """A round closed with so many, and without so many that are to be expected."""
        self._rounds, self._asked, self._late = self._rounds + 1, self._asked + contributions + late, self._late + late

    def is_time(self, fragments: int) -> bool:
        """Whether enough rounds have closed to look at H again."""
        if not self._is_auto or self._rounds < fragments:
            return False
        if self._settles:
            self._settles = False
            self._rounds = self._asked = self._late = 0
        return self._asked >= ASKED

    def look(self, measured: Measured) -> str:
        """Decide anew. Returns why H has changed, in words; empty: it has not."""
        if measured.step_s <= 0:
            return ""
        before, late, carries = self.steps, self._late / self._asked, carried(measured)
        self._rounds = self._asked = self._late = 0
        self._quiet = self._quiet + 1 if carries <= before * (1 - STEP) and late <= LATE / 2 else 0
        may_fall = self._quiet >= self._patience
        self.steps = following(before, carries, late, EVERY_LEAST, EVERY_MOST, may_fall=may_fall)
        if self.steps == before:
            return ""
        self._settles, self._quiet = True, 0
        if self.steps > before and self._fell:
            self._patience = min(2 * self._patience, QUIET_MOST)
        self._fell = self.steps < before
        return f"{late:.1%} late" if late > LATE else f"{carries} would do"
