"""How long a contribution of a member can be: by its steps, and by what the others sent last.

Whoever is healthy trains the same model at the same rates. So its way is about as long as that of others for as many
steps: it grows with the steps at most, where it is straight, and with their root at least. What is far beyond is noise,
a value with a flipped bit, or a learner that diverges. Those say what is usual that have sent some. At its start a
learner's rate rises: beside a first contribution it may go further, as the squares of its steps. Whoever has taken so
many times as many steps may be at so many times the rate: as much further it may go, if it went as far before.
A little further than was ever usual anybody may go at any time: the rates of others may have fallen since, or a model
has converged and meets a hard example. Beside fewer than two others nobody can say which one is sick: there a learner
may go as far as it went before, or as is usual for the size of what it trains.

What is refused counts as seen, too: once most learners go further, that is how far one may go. All this is kept in
memory only, except for the highest norm that was ever usual, which each version keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median_high, median_low
from typing import TypeAlias

from diloco_common.wire.manifest import Fragment

FAR = 6.0
"""Times the usual length for as many steps. 99 % of honest ones of equal speed are below 1.6 times the median. At 4 the
fast one of two unequal learners is refused; at 8 the opposite of the others' mean, times ten, passes at the start."""
STRAIGHT = 2.0
"""The same, where a way grows with its steps and not with their root."""
SPARSE = 2.0
"""Times as far per element as in other fragments: rows of an embedding, or an expert, that few have met so far."""
FIRST_OF_SEED, SPARSE_OF_SEED = 0.3, 0.03
"""Share of the norm of version 0 per H steps, with nothing else to compare with: for the first contribution of a
learner, which may have to do with one of another that has begun to warm up, and later. Rare rows took 0.01."""
START_OF_SEED = 3.0
"""The same for the first of all, while others that are here have sent nothing yet."""
FURTHER = 2.0
"""Times the steps of its last merged one: so much further, the few contributions of a newcomer do not say how far it
goes, as its rate has risen meanwhile."""
QUIET = 0.01
"""Per element, where version 0 is zeros."""
UP, DOWN = 1.2, 0.97
"""How fast what a learner may do by its own past follows what it does, per contribution."""
YOUNG, UP_YOUNG = 4, 2.0
"""The same for its first contributions: while its rate rises from 0, the second is nine times as long as the first."""
AGAIN = 1.5
"""Times as far as was ever usual, at any time. Hard examples took 0.93 (`benchmarks/honest.py`)."""
SETTLED = 4
"""Contributions after which a learner says what is usual."""
CROWD = 16
"""From so many others on, one learner does not change what is usual."""
LOOKED_AT = 64
"""Other fragments that are looked at where a contribution is far off."""


Steps: TypeAlias = Mapping[str, int]
"""The learners that are here -> the inner steps that each has taken, as far as they count."""
LeftOut: TypeAlias = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Way:
    """Of one contribution, or the usual one of many."""

    norm: float
    steps: int
    """As far as they are believed."""
    at: float = 0.0
    until: int = 0
    """The learner's inner steps when it was sent, as far as they count, if it was its first one; else 0."""

    def rises(self, steps: int, until: int) -> float:
        """How long a healthy way of so many steps, to that inner step, can be while a rate rises from zero: each step
        is in proportion to its number. Beside a way that was no first one, as `reach`."""
        if not self.until:
            return self.reach(steps)
        times = _squares(steps, until) / _squares(self.steps, self.until)
        return max(self.reach(steps), FAR * self.norm * times)

    def reach(self, steps: int) -> float:
        """How long a healthy way of so many steps can be beside this one."""
        times = steps / self.steps
        return self.norm * max(FAR * math.sqrt(times), STRAIGHT * times)

    def goes(self, steps: int) -> float:
        """How long a way of so many steps can be at the same rate."""
        times = steps / self.steps
        return self.norm * max(math.sqrt(times), times)

    @property
    def pace(self) -> float:
        """Of a way that is not straight."""
        return self.norm / math.sqrt(self.steps)


@dataclass(slots=True)
class Past:
    """Of one learner, in one fragment."""

    last: Way
    """What it sent last, taken or not."""
    count: int = 0
    """How often it sent something."""
    own: Way | None = None
    """What it may be measured by, of what was merged. Follows slowly."""
    steady: Way | None = None
    """The same as it was when the learner had settled."""

    def took(self) -> None:
        """What it sent last is merged."""
        way, before = self.last, self.own
        if before is not None and before.norm > 0:
            usual = before.norm * way.steps / before.steps
            up = UP_YOUNG if self.count < YOUNG else UP
            way = Way(min(max(way.norm, DOWN * usual), up * usual), way.steps)
        self.own = way
        if self.steady is None and self.count >= SETTLED:
            self.steady = way


@dataclass
class Ways:
    """Of the learners of one shard, in one fragment."""

    num_elements: int
    of: dict[str, Past] = field(default_factory=dict)
    """By learner."""
    of_crowd: Way | None = None
    """The usual one of many, looked up now and then."""
    looked_at: int = 0
    """Contributions until then."""

    def others(self, learner_id: str, live: Steps, is_left_out: LeftOut) -> tuple[Sequence[Way], bool]:
        """Those that say what is usual, and whether that is enough. Of a crowd only the usual one.

        Learners that are here go before those that were, and settled ones before new ones.
        """
        if len(self.of) > CROWD and len(live) > CROWD:
            sent = sum(past.count for past in self.of.values())
            if self.of_crowd is None or CROWD * (sent - self.looked_at) > len(live):
                here = [past for one, past in self.of.items() if one in live and not is_left_out(one)]
                ways = sorted((past.last for past in here or self.of.values()), key=lambda way: way.pace)
                self.of_crowd, self.looked_at = ways[len(ways) // 2], sent
            return [self.of_crowd], True
        others = {one: past for one, past in self.of.items() if one != learner_id and not is_left_out(one)}
        pasts = [past for one, past in others.items() if one in live] or [*others.values()]
        settled = [past for past in pasts if past.count >= SETTLED]
        return [past.last for past in (settled if len(settled) > 1 else pasts)], len(settled) > 1

    def saw(self, learner_id: str, way: Way) -> None:
        past = self.of.get(learner_id)
        if past is None:
            past = self.of[learner_id] = Past(way)
        else:
            past.last = replace(way, until=0)
        past.count += 1


class Lengths:
    """Of the learners of one shard, in all fragments of the model."""

    def __init__(self, is_left_out: LeftOut = lambda _: False) -> None:
        """`is_left_out`: whether nobody is compared with this learner, in quarantine, although it has sent some."""
        self._is_left_out = is_left_out
        self._ways: dict[int, Ways] = {}

    def last(self, fragment_id: int, learner_id: str) -> Way | None:
        past = self._past(fragment_id, learner_id)
        return None if past is None else past.last

    def saw(self, fragment: Fragment, learner_id: str, way: Way) -> None:
        """A finite contribution has come, and was judged. Once each."""
        ways = self._ways.setdefault(fragment.fragment_id, Ways(fragment.num_elements))
        ways.saw(learner_id, way)

    def took(self, fragment_id: int, learner_id: str) -> None:
        past = self._past(fragment_id, learner_id)
        if past is not None:
            past.took()

    def forget(self, learner_id: str) -> None:
        """The learner has been gone for long."""
        for ways in self._ways.values():
            ways.of.pop(learner_id, None)

    def _past(self, fragment_id: int, learner_id: str) -> Past | None:
        ways = self._ways.get(fragment_id)
        return None if ways is None else ways.of.get(learner_id)

    def most(
        self,
        fragment: Fragment,
        learner_id: str,
        way: Way,
        live: Steps,
        every: int,
        seed_norm: float,
        usual_ever: float,
    ) -> float | None:
        """The longest that a healthy learner's contribution can be, if this one is longer. 0: it is not, as far as
        anybody can say. None: there is nobody to compare with.

        `every`: H of the fragment; `seed_norm`: of its version 0; `usual_ever`: the highest norm that ever was usual,
        as if for H steps.
        """
        fragment_id, steps = fragment.fragment_id, way.steps
        ways = self._ways.get(fragment_id, Ways(fragment.num_elements))
        others, is_enough = ways.others(learner_id, live, self._is_left_out)
        root, rounds = math.sqrt(fragment.num_elements), max(1.0, steps / every)
        ever = AGAIN * Way(usual_ever, every).goes(steps)
        if not others:
            if not self._beside(learner_id, live) or seed_norm < QUIET * root:
                return None
            most = max(ever, START_OF_SEED * seed_norm * rounds)
            return most if way.norm > most else 0.0
        most = max(ever, median_high([other.reach(steps) for other in others]))
        if way.norm <= most:
            return 0.0
        until = live.get(learner_id, 0)
        rising = median_high([other.rises(steps, until) for other in others])
        size, past = max(seed_norm, QUIET * root), ways.of.get(learner_id, Past(way))
        own = past.own
        if own is not None:
            further = most * self._more_steps(learner_id, live)
            if not is_enough:
                further = max(further, (past.steady or own).reach(steps), FIRST_OF_SEED * size * rounds)
            most = max(most, min(own.rises(steps, until), max(further, rising)))
        elif not is_enough:
            most = max(most, rising)
        sparse = SPARSE * root * self._elsewhere(fragment_id, learner_id, steps, live)
        if not is_enough or not sparse:
            begins = own is None or (past.count < SETTLED and steps > FURTHER * own.steps)
            share = FIRST_OF_SEED if begins else SPARSE_OF_SEED
            sparse = max(sparse, share * size * rounds)
        most = max(most, sparse)
        return most if way.norm > most > 0 else 0.0

    def _beside(self, learner_id: str, live: Steps) -> list[int]:
        """The steps of the others that are here."""
        return [steps for one, steps in live.items() if one != learner_id and not self._is_left_out(one)]

    def _more_steps(self, learner_id: str, live: Steps) -> float:
        """How many times as many inner steps this learner has taken as the usual one of the others; at least 1."""
        others = self._beside(learner_id, live)
        return max(1.0, live.get(learner_id, 0) / max(1, median_low(others))) if others else 1.0

    def _elsewhere(self, fragment_id: int, learner_id: str, steps: int, live: Steps) -> float:
        """How far others go per element where they go furthest: root mean square, of other fragments."""
        furthest = 0.0
        for ways in islice((ways for one, ways in self._ways.items() if one != fragment_id), LOOKED_AT):
            others, _ = ways.others(learner_id, live, self._is_left_out)
            if others:
                usual = median_high([way.goes(steps) for way in others])
                furthest = max(furthest, usual / math.sqrt(ways.num_elements))
        return furthest


def _squares(steps: int, until: int) -> int:
    """Of so many steps, the last one with this number: the sum of their numbers, doubled."""
    until = max(steps, until)
    return until**2 - (until - steps) ** 2
