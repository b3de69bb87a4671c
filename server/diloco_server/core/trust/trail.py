"""What learners say that they have trained, held against the shard's own clock and against each other.

A shard sees neither the data nor the steps of a learner, only its reports. So a report counts as fast as the usual
learner allows: the median of those that answer when rounds ask them. What is above counts later, so nothing is lost to
a learner that catches up after a cut. A learner that reports, but is in no round, opens none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from diloco_common.errors import Implausible
from diloco_common.wire.messages import Progress, PushHeader

STEPS_FACTOR = 16
"""A learner's steps count for rounds at most so many times as fast as those of the usual learner."""
TRAINED_FACTOR = 64
"""A contribution is refused if its learner would have to be so many times as fast as the usual one. It is wide:
learners of one run may differ by far, and no honest one may be refused. In 100 000 simulated pushes 16 refused none."""
UNKNOWN_STEPS_PER_S = 2.0**20
UNKNOWN_TOKENS_PER_S = 2.0**30
"""Of the usual learner, as long as there is none."""
STEPS_KNOWN = 8
"""Steps after which the pace of a learner is known."""
IDLE_ROUNDS = 16
"""Rounds of any fragments, one after the other, that a learner was asked for and is not in: then it is idle. It opens
no round for those that contribute."""
UNREPORTED_S = 1.0
"""A push may overtake the report of its last step, on another connection."""
AWAY_S = 960.0
"""For the first contribution after a start of the shard: its learner may have trained while no shard was there. A usual
one for `TRAINED_FACTOR` times as long: 17 hours."""
WAKING_S = 60.0
"""For so long after a freeze of the shard, reports may show what was trained during it. Learners are back by then."""
STEP_TIME_FACTOR = 2.0
"""A reported step time is taken up to so many times what passes between the reports."""
ALPHA = 0.1
"""Weight of the newest report in the average of step times."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a learner trains, by the shard's clock."""

    steps_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Most:
    """How fast reports count, at most."""

    steps_per_s: float
    """For rounds."""
    trained: Pace
    """For what contributions can hold. A learner may be too slow for the rounds of others, and have trained."""


@dataclass
class Trail:
    """The reports of one process, as far as they count. Starts with its first one."""

    first: Progress
    first_at: float
    counted: Progress
    """For rounds; at most what was reported."""
    counted_at: float
    grown_at: float
    """When the last step was counted."""
    reported: Progress
    """When its steps grew last; of that, `pace`. What counts depends on the pace of others."""
    reported_at: float
    asleep_s: float = 0.0
    """Seconds for which the shard was frozen and no report shows that the learner trained. It may have been frozen,
    too; and what is read first afterwards may have been sent before."""
    woke_at: float = 0.0
    step_s: float = 0.0
    """Moving average of what passes per step, between reports; 0: no step yet."""
    merged_until: dict[int, Progress] = field(default_factory=dict)
    """Fragment -> what counted when the round opened that merged its last contribution. That holds all before."""
    _steps: float = 0.0
    _trained_steps: float = 0.0
    _tokens: float = 0.0

    @classmethod
    def begin(cls, first: Progress, now: float) -> Trail:
        counted, steps = Progress(first.inner_step, first.tokens), float(first.inner_step)
        return cls(
            first, now, counted, now, now, first, now, _steps=steps, _trained_steps=steps, _tokens=first.tokens
        )  # fmt: skip

    def slept(self, seconds: float, now: float) -> None:
        """The shard was frozen until now."""
        self.asleep_s, self.woke_at = self.asleep_s + seconds, now

    def go_on(self, progress: Progress, most: Most, now: float) -> None:
        """Count another report, at most at this pace since the one before."""
        if now - self.woke_at > WAKING_S:
            self.asleep_s = 0.0
        slept_s = self._trained_through(progress, now)
        self.asleep_s -= slept_s
        self.first_at -= slept_s
        since_s, took_s = (max(0.0, now - at) + slept_s for at in (self.counted_at, self.grown_at))
        steps, tokens = progress.inner_step, progress.tokens
        self._steps = min(steps, self._steps + _in(since_s, most.steps_per_s))
        self._trained_steps = min(steps, self._trained_steps + _in(since_s, most.trained.steps_per_s))
        self._tokens = min(tokens, self._tokens + _in(since_s, most.trained.tokens_per_s))
        self.counted_at = now
        if progress.inner_step > self.reported.inner_step:
            self.reported, self.reported_at = progress, now
        grown = int(self._steps) - self.counted.inner_step
        if grown > 0:
            self.step_s += (ALPHA if self.step_s else 1.0) * (took_s / grown - self.step_s)
            self.grown_at = now
        step_time_s = min(progress.step_time_s, STEP_TIME_FACTOR * self.step_s)
        self.counted = Progress(int(self._steps), int(self._tokens), progress.loss, step_time_s)

    @property
    def trained(self) -> Progress:
        """What its contributions can hold, all together."""
        return Progress(int(self._trained_steps), self.counted.tokens)

    def _trained_through(self, progress: Progress, now: float) -> float:
        """For how much of the shard's sleep the learner must have trained to report this, at the pace that it had."""
        if not self.asleep_s or self.pace is None:
            return 0.0
        took_s = (progress.inner_step - self.reported.inner_step) / self.pace.steps_per_s
        return min(self.asleep_s, max(0.0, took_s - (now - self.reported_at)))

    @property
    def pace(self) -> Pace | None:
        """By all that it has reported; None: not known yet."""
        steps, tokens = self.reported.inner_step - self.first.inner_step, self.reported.tokens - self.first.tokens
        seconds = self.reported_at - self.first_at
        if steps < STEPS_KNOWN or tokens <= 0 or seconds <= 0:
            return None
        return Pace(steps / seconds, tokens / seconds)


def usual(trails: Iterable[Trail]) -> Pace | None:
    """The pace of the usual one of these; None: nobody's is known. A minority of liars moves it little."""
    paces = [pace for trail in trails if (pace := trail.pace) is not None]
    if not paces:
        return None
    return Pace(median(p.steps_per_s for p in paces), median(p.tokens_per_s for p in paces))


def countable(pace: Pace | None) -> Most:
    """The most that a learner's reports count for, given the pace of the usual one."""
    if pace is None:
        return Most(math.inf, Pace(math.inf, math.inf))
    trained = Pace(TRAINED_FACTOR * pace.steps_per_s, TRAINED_FACTOR * pace.tokens_per_s)
    return Most(STEPS_FACTOR * pace.steps_per_s, trained)


def check_trained(
    header: PushHeader, learner_id: str, trail: Trail | None, pace: Pace | None, before_s: float, now: float
) -> None:
    """The learner can have trained what it pushes. Raises Implausible.

    That is what it has reported since the round that merged its last contribution to the fragment was opened, and what
    it may not have reported yet. Before that round it is judged by the time alone, `before_s`. Both grow faster than
    any honest learner trains, so nobody is refused for long.
    """
    asleep_s = 0.0 if trail is None else trail.asleep_s
    tokens_per_s, steps_per_s = UNKNOWN_TOKENS_PER_S, UNKNOWN_STEPS_PER_S
    if pace is not None:
        tokens_per_s, steps_per_s = TRAINED_FACTOR * pace.tokens_per_s, TRAINED_FACTOR * pace.steps_per_s
    trained = Progress(0, 0) if trail is None else trail.trained
    since = None if trail is None else trail.merged_until.get(header.fragment_id)
    if trail is None or since is None:
        unreported_s = asleep_s + before_s
        since = trained if trail is None else trail.first
    else:
        unreported_s = asleep_s + now - trail.grown_at
    for what, pushed, reported, per_s in (
        ("tokens", header.tokens, trained.tokens - since.tokens, tokens_per_s),
        ("steps", header.steps, trained.inner_step - since.inner_step, steps_per_s),
    ):
        most = max(0, reported) + per_s * (unreported_s + UNREPORTED_S)
        if pushed > most:
            raise Implausible(
                f"fragment {header.fragment_id}: {learner_id} pushes {pushed} {what}, but has reported {reported} that "
                f"are not merged, and can have trained at most {most:.0f}; push what was trained"
            )


def _in(seconds: float, per_s: float) -> float:
    return per_s if math.isinf(per_s) else seconds * per_s
