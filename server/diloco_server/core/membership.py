"""Leases and generations: which learners are alive and may contribute.

A lease ends when its learner has been silent for `lease_s`. Every join, of any learner, gets the next generation. So an
old generation never becomes current again, and calls that use one are fenced off.

Also detects learners that train on the same batches, because they report the same losses to the last bit. All learners
start from the same values; if all shuffle their data with one seed, the run learns from one learner's data. Losses of
different batches are equal now and then, but not over several steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from diloco_common.errors import Busy, LeaseExpired, NotJoined, Refusal, Revoked, StaleGeneration, Superseded
from diloco_common.settings import LeaseSettings
from diloco_common.wire.calls import JOIN_WITHIN_S
from diloco_common.wire.messages import Progress
from diloco_server.core.arrivals import Arrivals, Reports

STALLED_LEASES = 5
"""A learner whose heartbeats arrive is stalled if it has ended no inner step for this many leases."""
IDLE_ROUNDS = 16
"""A learner is idle, and no longer decides when rounds open, after this many rounds in a row that closed without it."""
LAST_TRIES = 3
"""Maximum number of rounds in which a leaving learner may hand over its work, if contributions get lost."""


NOTHING = Progress(0, 0)


class LeaseState(Enum):
    ALIVE = "alive"  # holds a lease
    STALLED = "stalled"  # holds a lease, but has finished no inner step for long
    EVICTED = "evicted"  # the lease ran out, or was revoked
    LEFT = "left"  # said goodbye


@dataclass
class Member:
    """A learner as one shard knows it: its current generation, and totals over all of them."""

    learner_id: str
    process_id: str
    generation: int
    last_heard: float
    last_step_at: float
    began: float
    """When its process started, by this shard's clock: the earliest that its Joins said. A slow Join says later."""
    index: int = 0
    """Its number, unique among live learners."""
    site: str = ""
    """The site that it reports, for mirrors; empty: it reports none."""
    first_generation: int = 0
    """The first generation of this process. Earlier ones are over; their calls are answered SUPERSEDED."""
    previous: tuple[str, float] | None = None
    """The process that had the id before this one, and when it started."""
    state: LeaseState = LeaseState.ALIVE
    evicted_for: str = ""
    """Stable code of the eviction."""
    progress: Progress = field(default_factory=lambda: Progress(0, 0))
    """The last report of this generation."""
    reports: Reports | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    first_step: int | None = None
    """Inner step of this generation's first report; the cadence counts from it."""
    idle_rounds: int = 0
    """Rounds that asked this process and closed without it since its last contribution."""
    silent_rounds: int | None = None
    """Such rounds since it last pushed for one, even late; None: it never has."""
    waited_for: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Fragment -> the last round that waited for it because it was overdue, and its inner step at that time."""
    had_last: set[int] = field(default_factory=set)
    """Fragments for which it had the round that it requested while leaving. It gets one for each until it is merged
    there, across processes, so that nobody can force rounds open."""
    last_tries: Counter[int] = field(default_factory=Counter)
    """Fragment -> how many of those rounds it had, since its contribution may be lost or refused."""
    asked: int = 0
    contributed: int = 0
    merged: int = 0
    tokens_merged: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    """Requested contributions that are in no version, by code."""

    def least(self, process_id: str, began: float) -> float:
        """When a process started that now says `began`: the earliest that it said, here or as the previous process."""
        known = dict(filter(None, [self.previous, (self.process_id, self.began)]))
        return min(began, known.get(process_id, began))

    @property
    def live(self) -> bool:
        return self.state is LeaseState.ALIVE or self.state is LeaseState.STALLED

    @property
    def reported(self) -> Progress:
        """The last report of this process, under any lease."""
        return NOTHING if self.reports is None else self.reports.last

    @property
    def is_idle(self) -> bool:
        """Whether it is asked, but none of its contributions is accepted."""
        return self.idle_rounds >= IDLE_ROUNDS

    @property
    def sets_pace(self) -> bool:
        """Whether it counts when the usual pace is measured: it is alive and answers requests, even late."""
        answers = self.silent_rounds is not None and self.silent_rounds < IDLE_ROUNDS
        return answers and self.state is LeaseState.ALIVE

    @property
    def may_answer(self) -> bool:
        """Whether it answers requests, or was not asked often enough to tell."""
        rounds = self.idle_rounds if self.silent_rounds is None else self.silent_rounds
        return rounds < IDLE_ROUNDS and self.state is LeaseState.ALIVE

    @property
    def is_leaving(self) -> bool:
        """Whether it hands over its last work and takes no more steps."""
        return self.progress.last_rounds is not None

    def takes_part(self, fragment_id: int) -> bool:
        """Whether rounds of this fragment ask it. While leaving, it takes part only where it has work of its own."""
        return self.progress.last_rounds is None or fragment_id in self.progress.last_rounds

    def wants_last(self, fragment_id: int) -> bool:
        """Whether it leaves and still needs a round of this fragment for its work."""
        return fragment_id in (self.progress.last_rounds or ()) and fragment_id not in self.had_last

    def takes_last(self, fragment_id: int) -> bool:
        """If it still needs that round, this round counts as that one. Returns whether it needed it."""
        wants = self.wants_last(fragment_id)
        if wants:
            self.had_last.add(fragment_id)
            self.last_tries[fragment_id] += 1
        return wants

    def lost_last(self, fragment_id: int) -> None:
        """Its last contribution is in no version: allow that round again, `LAST_TRIES` in all."""
        if self.last_tries[fragment_id] < LAST_TRIES:
            self.had_last.discard(fragment_id)

    def trains_on(self, fragment_id: int) -> None:
        """It was merged and is not leaving: allow that round again when it leaves."""
        self.had_last.discard(fragment_id)
        self.last_tries.pop(fragment_id, None)

    def missed_round(self) -> None:
        self.idle_rounds += 1
        if self.silent_rounds is not None:
            self.silent_rounds += 1

    def contributes(self) -> None:
        self.contributed += 1
        self.idle_rounds = self.silent_rounds = 0

    def is_late(self) -> None:
        self.silent_rounds = 0


class Membership:
    """The learners of one shard: at most `max_learners` with a lease, and as many without."""

    def __init__(self, settings: LeaseSettings, max_learners: int) -> None:
        self._settings = settings
        self._max_learners = max_learners
        self.max_gone = max_learners
        self._members: dict[str, Member] = {}
        self._live: tuple[Member, ...] | None = None  # cache of `live`
        self._generations = 0  # grows; never reset within an epoch
        self._expires_at = 0.0  # no lease can expire or stall before this time

    def welcome(self, learner_id: str, process_id: str, began: float) -> None:
        """Check whether this process, which started at `began`, may join.

        Of two processes with one id, the one that started later has the id, at every shard: otherwise each could hold
        some shards forever. A slow Join makes a start look later, so if two processes started within `JOIN_WITHIN_S`,
        the one with the greater process id counts as later. A process without a lease never blocks another.

        Raises Superseded if the process that holds the lease is the later one.
        """
        old = self._members.get(learner_id)
        if old is None or not old.live or old.process_id == process_id:
            return
        younger_s = old.least(process_id, began) - old.began
        is_later = process_id > old.process_id if abs(younger_s) <= JOIN_WITHIN_S else younger_s > 0
        if not is_later:
            raise superseded(learner_id)

    def join(
        self, learner_id: str, process_id: str, now: float, index: int | None = None, age_s: float = 0.0
    ) -> Member:  # fmt: skip
        """Grant a lease with a new generation. `index`: the number that the learner says it had. Raises Busy."""
        old = self._members.get(learner_id)
        if (old is None or not old.live) and len(self.live()) >= self._max_learners:
            raise Busy(f"{self._max_learners} learners hold a lease already (shard.max_learners); try again later")
        self._generations += 1
        member = Member(learner_id, process_id, self._generations, now, last_step_at=now, began=now - age_s)
        member.index = self._index(learner_id, index)
        if old is None or old.process_id != process_id:
            member.first_generation = member.generation
            member.previous = None if old is None else (old.process_id, old.began)
        else:
            member.first_generation, member.previous = old.first_generation, old.previous
            member.reports, member.idle_rounds, member.silent_rounds = old.reports, old.idle_rounds, old.silent_rounds
            member.arrivals = old.arrivals
        if old is not None:
            member.began = old.least(process_id, member.began)
            member.asked, member.contributed, member.merged = old.asked, old.contributed, old.merged
            member.tokens_merged, member.missed = old.tokens_merged, old.missed
            member.had_last, member.last_tries = old.had_last, old.last_tries
        self._members[learner_id] = member
        self._live = None
        return member

    def _index(self, learner_id: str, had: int | None) -> int:
        """The first of these numbers that is free: the one it says it had, its last one, and then the smallest."""
        old = self._members.get(learner_id)
        taken = {m.index for m in self.live() if m.learner_id != learner_id}
        candidates: tuple[int | None, ...] = (had, None if old is None else old.index, *range(len(taken) + 1))
        return next(i for i in candidates if i is not None and i not in taken)

    def get(self, learner_id: str) -> Member | None:
        return self._members.get(learner_id)

    def check(self, learner_id: str, generation: int) -> Member:
        """The member that makes a call. Raises NotJoined, StaleGeneration, Superseded, LeaseExpired."""
        member = self._members.get(learner_id)
        if member is None or generation > member.generation:
            raise NotJoined(f"{learner_id} has no lease here; join first")
        if generation < member.first_generation:
            raise superseded(learner_id)
        if generation < member.generation:
            raise StaleGeneration(learner_id, generation, member.generation)
        if member.live:
            return member
        raise self.eviction(member)

    def eviction(self, member: Member) -> Refusal:
        if member.state is LeaseState.LEFT:
            return NotJoined(f"{member.learner_id} has left; join again to come back")
        if member.evicted_for == Revoked.code:
            return NotJoined(f"{member.learner_id} was revoked; join again with a valid certificate")
        limit = f"{self._settings.lease_s:g} s (lease.lease_s)"
        return LeaseExpired(f"{member.learner_id} was silent for more than {limit}; join again")

    def heard(self, member: Member, progress: Progress, now: float) -> None:
        member.last_heard = now
        if member.reports is None:
            member.reports = Reports.begin(progress, now)
        else:
            member.reports.go_on(progress, now)
        if member.first_step is None:
            member.first_step = progress.inner_step
        if progress.inner_step > member.progress.inner_step:
            member.last_step_at = now
            member.state = LeaseState.ALIVE  # it holds a lease, so the live members stay the same
        member.progress = progress

    def leave(self, member: Member) -> None:
        member.state = LeaseState.LEFT
        self._live = None

    def revoke(self, member: Member) -> None:
        self._evict(member, Revoked.code)

    def _evict(self, member: Member, code: str) -> None:
        member.state, member.evicted_for = LeaseState.EVICTED, code
        self._live = None

    def expire(self, now: float) -> list[Member]:
        if now < self._expires_at:
            return []
        gone: list[Member] = []
        lease_s = self._settings.lease_s
        stalled_s = STALLED_LEASES * lease_s
        self._expires_at = now + lease_s  # for learners that join or report from now on; the loop handles the others
        for member in self.live():
            silent_s, idle_s = now - member.last_heard, now - member.last_step_at
            if silent_s > lease_s:
                self._evict(member, LeaseExpired.code)
                gone.append(member)
                continue
            left_s = lease_s - silent_s
            if idle_s > stalled_s:
                member.state = LeaseState.STALLED
            else:
                left_s = min(left_s, stalled_s - idle_s)
            self._expires_at = min(self._expires_at, now + left_s)
        return gone

    def forget(self) -> list[str]:
        """If more than `max_gone` members have no lease, drop those that have been gone longest. Returns their ids."""
        if len(self._members) - len(self.live()) <= self.max_gone:
            return []
        gone = sorted((m for m in self._members.values() if not m.live), key=lambda m: m.last_heard)
        dropped = [m.learner_id for m in gone[: max(0, len(gone) - self.max_gone)]]
        for learner_id in dropped:
            del self._members[learner_id]
        return dropped

    def live(self) -> tuple[Member, ...]:
        """Members with a lease, sorted by id."""
        if self._live is None:
            self._live = tuple(m for m in self.all() if m.live)
        return self._live

    def all(self) -> list[Member]:
        return [self._members[learner_id] for learner_id in sorted(self._members)]


def superseded(learner_id: str) -> Superseded:
    """The refusal for a process whose id another process has taken."""
    return Superseded(f"another process joined as {learner_id}; give each worker its own learner id")


ALIKE = 3
"""So many equal losses of two learners at equal steps and tokens are no coincidence: they train on the same data."""
REPORTS_MAX = 4096
"""Maximum number of remembered reports, and of pairs of learners: enough for some steps of a thousand learners."""


class Likeness:
    def __init__(self) -> None:
        self._first: dict[tuple[int, int, float], str] = {}  # inner step, tokens and loss -> who reported it first
        self._alike: dict[tuple[str, str], set[float]] = {}  # losses that two learners share
        self._said: set[tuple[str, str]] = set()

    def heard(self, learner_id: str, progress: Progress) -> str | None:
        """Take a learner's report. Returns the other learner with the same losses, once per pair."""
        if progress.loss is None or not progress.inner_step:
            return None
        report = progress.inner_step, progress.tokens, progress.loss
        other = self._first.setdefault(report, learner_id)
        if len(self._first) > REPORTS_MAX:
            del self._first[next(iter(self._first))]
        pair = other, learner_id
        if other == learner_id or pair in self._said:
            return None
        alike = self._alike.setdefault(pair, set())
        alike.add(progress.loss)
        if len(alike) < ALIKE:
            if len(self._alike) > REPORTS_MAX:
                del self._alike[next(iter(self._alike))]
            return None
        del self._alike[pair]
        if len(self._said) >= REPORTS_MAX:
            self._said.clear()
        self._said.add(pair)
        return other
