"""Chooses H when `sync.sync_every` is "auto": the smallest that link, shard and step time allow with room to spare.

Each shard chooses for its own fragments, by its own clock. In H steps every fragment is asked for, pushed, merged and
pulled once. Each of these has to fit in half of that time; pulls in three quarters, because they mostly wait:

    push     the usual learner pushes the whole model: one link for all shards
    pull     it pulls every version of this shard, one after another
    shard    the shard merges and publishes all its fragments
    round    one fragment goes round, including all waits

If more than 2 % of the requested contributions arrive late, H is too small, whatever the reason. A learner contributes
to a fragment again only after it has pulled the version before, so a queue of versions makes it late.

H at most doubles in one change. It falls by at most a quarter, and only after it was too large several times in a row;
that number doubles whenever a fall proves to be too far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco_common.settings import EVERY_LEAST, EVERY_MOST, SyncSettings

ROOM, PULL_ROOM = 0.5, 0.75
"""The share of H steps that one part of the way may take."""
LATE = 0.02
"""The share of requested contributions that may be late."""
ASKED = 64
"""Requested contributions needed to measure that share."""
STEP = 0.25
"""H changes by at least this share, and falls by at most this share."""
QUIET, QUIET_MOST = 2, 64
"""Consecutive looks that must allow a smaller H before it falls: at first, and at most."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a shard has measured, in seconds; 0: unknown. Each value but `step_s` must fit in H steps."""

    step_s: float
    push_s: float = 0.0
    pull_s: float = 0.0
    shard_s: float = 0.0
    round_s: float = 0.0


def carried(measured: Measured) -> int:
    half_s = max(measured.push_s, measured.shard_s, measured.round_s) / ROOM
    return max(1, math.ceil(max(half_s, measured.pull_s / PULL_ROOM) / measured.step_s))


def following(every: int, carries: int, late: float, least: int, most: int, *, may_fall: bool) -> int:
    """The next H. `late`: the share of requested contributions that came late. `least`, `most`: the allowed range."""
    wanted = every
    if late > LATE:
        wanted = 2 * every
    elif carries > every * (1 + STEP) or (carries <= every * (1 - STEP) and may_fall):
        wanted = min(max(carries, math.ceil(every * (1 - STEP))), 2 * every)
    return min(max(wanted, least), most)


class Every:
    """The current H of one shard."""

    def __init__(self, sync: SyncSettings) -> None:
        self.steps = sync.first_every
        self.announced_at: dict[int, float] = {}
        """Fragment -> when its latest version was announced."""
        self._is_auto = sync.sync_every == "auto"
        self._rounds = self._asked = self._late = 0  # since the last look
        self._settles = True  # rounds opened under the previous H may still close
        self._quiet, self._patience, self._fell = 0, QUIET, False

    def closed(self, contributions: int, late: int) -> None:
        """Count a closed round: its contributions, and the expected ones that were late."""
        self._rounds, self._asked, self._late = self._rounds + 1, self._asked + contributions + late, self._late + late

    def is_time(self, fragments: int) -> bool:
        if not self._is_auto or self._rounds < fragments:
            return False
        if self._settles:
            self._settles = False
            self._rounds = self._asked = self._late = 0
        return self._asked >= ASKED

    def look(self, measured: Measured) -> str:
        """Choose H again. Returns why it changed; empty if it did not."""
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
