"""From the answers of shards to what the page shows: one state, and what changed in it since a number.

Pure: `live_page.py` hands in answers and the time (seconds since 1970), and passes on what `since` gives. Whatever
stops answering stays, with the time since when. Nothing is guessed: what no shard has said is null.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from diloco_deploy.progress import Pace, tokens_merged
from diloco_deploy.web.course import Course, Point, Trend
from diloco_deploy.web.events import Events
from diloco_deploy.web.headlines import SPANS_S, headlines
from diloco_deploy.web.learners import Learner, Sight, counts_of, forget_most, page_of, put_together
from diloco_deploy.web.rounds import DrawnRounds

Answer = Mapping[str, Any]
OUTAGES_MAX = 128
TAGS_OF_LEARNERS = {
    "awaited": "w", "training": "t", "stalled": "s", "quarantined": "q", "partly": "p", "away": "a", "left": "l",
    "unknown": "u",
}  # fmt: skip
_COUNTERS = ("rounds", "duplicates", "evictions", "versions_lost", "bytes_pushed", "bytes_pulled")


@dataclass
class Outage:
    """A span in which a shard did not answer."""

    seq: int
    shard: str
    began: float
    ended: float | None = None


@dataclass
class Shard:
    """One shard, as it was asked under one name."""

    name: str
    """It is asked under this name, which may be no more than an address."""
    label: str = ""
    """What people call it: its own name once it has said so."""
    answers: bool = False
    heard_at: float | None = None
    why_not: str = "not asked yet"
    asked_at: float = 0.0
    """For its last answer."""
    status: Answer = field(default_factory=dict)
    """Its last answer; kept when it stops answering."""
    listing: Answer = field(default_factory=dict)
    """Its last answer that lists fragments, as none are listed while a shard reads its versions."""
    starts: int = 0
    """Epochs that this page has seen."""
    traced: tuple[int, int] = (0, 0)
    """Epoch and number up to which its rounds are known."""
    past: Counter[str] = field(default_factory=Counter)
    """Counters of its earlier processes, as far as they were heard of."""
    past_refused: Counter[str] = field(default_factory=Counter)
    past_learners: dict[str, tuple[Counter[str], Counter[str]]] = field(default_factory=dict)

    def count(self, key: str) -> int:
        return self.past[key] + int(self.status.get(key) or 0)

    @property
    def refused(self) -> Counter[str]:
        return self.past_refused + Counter(self.status.get("rejected") or {})

    @property
    def epoch(self) -> Any:
        """Which process it is: its epoch, where the shard shows it."""
        return self.status.get("epoch")

    def bury(self) -> None:
        """Another process answers in its place: keep what this one had counted."""
        self.past.update({key: int(self.status.get(key) or 0) for key in _COUNTERS})
        self.past_refused.update(self.status.get("rejected") or {})
        for said in self.status.get("learners") or ():
            counts, missed = self.past_learners.setdefault(str(said["id"]), (Counter(), Counter()))
            counts.update(counts_of(said))
            missed.update(said.get("missed") or {})


class Feed:
    """What a page knows of one run. Owned by one event loop."""

    def __init__(self, now: float) -> None:
        self.began = now
        self._seq = 1  # grows with every change; 0 is what a new page knows
        self._shards: dict[str, Shard] = {}
        self._known: dict[str, Learner] = {}  # by `_learners`
        self._unread: set[str] = set()  # shards whose last answer is not in `_known` yet
        self._forgotten = 0
        self._course = Course()
        self._pace = Pace()
        self._rounds = DrawnRounds()
        self._events = Events()
        self._outages: deque[Outage] = deque(maxlen=OUTAGES_MAX)
        self._silent_since: float | None = now

    # ------------------------------------------------------------ what the shards say

    def expect(self, shards: Iterable[str], learners: Iterable[str] = ()) -> None:
        """These belong to the run. Whoever is no longer among them stays, and is away."""
        for name in shards:
            self._shards.setdefault(name, Shard(name, label=name))
        for learner_id in learners:
            self._known.setdefault(learner_id, Learner(learner_id, "awaited"))

    def traced(self, name: str) -> tuple[int, int]:
        """Epoch and number to ask a shard with for what is new of its rounds."""
        return self._shards[name].traced

    def heard(self, name: str, status: Answer, rounds: Answer | None, now: float, asked_at: float) -> None:
        """A shard has answered. `rounds`: its timeline; None: it tells none. `asked_at`: by a clock that is never set.

        Raises an error of any kind, and nothing has changed, where the answer is not as a shard's.
        """
        trial = Feed(now)  # one odd answer must not end the page for all: show it alone first
        trial.expect([name])
        trial._take(name, status, rounds, now, asked_at)
        trial.sample(now)
        trial.learners(sort="attention", descending=False, find="", page=0, now=now)
        trial.since(0, now)
        self._take(name, status, rounds, now, asked_at)

    def _take(self, name: str, status: Answer, rounds: Answer | None, now: float, asked_at: float) -> None:
        shard, seq = self._shards[name], self._next()
        if name in self._unread:  # or whoever was in the answer before, and is in no other, would never be known
            self._roll()
        uptime_s = float(status.get("uptime_s") or 0.0)
        is_new = shard.status and _is_another_process(shard.status, status, asked_at - shard.asked_at)
        if is_new:
            shard.bury()
            self._rounds.cut(seq, shard.label, shard.heard_at or now)
            self._events.say(seq, now - uptime_s, "shard started", "good", f"{shard.label} started again", shard.label)
        if not shard.answers:
            self._answers_again(shard, seq, now, is_new=bool(is_new))
        if not shard.status and all(one.label != status.get("name") for one in self._shards.values()):
            shard.label = str(status.get("name") or name)
        shard.starts += 1 if is_new or not shard.status else 0
        shard.answers, shard.heard_at, shard.why_not, shard.status = True, now, "", status
        if status.get("fragments") or status.get("run") != shard.listing.get("run"):
            shard.listing = status
        shard.asked_at = asked_at
        self._pace.heard(now, self.tokens_merged() or 0)
        self._silent_since = None
        if rounds is not None:
            self._heard_rounds(shard, rounds, seq, now)
        self._unread.add(name)

    def silent(self, name: str, why: str, now: float) -> None:
        """A shard did not answer; `why` in words."""
        shard, seq = self._shards[name], self._next()
        if shard.answers:
            self._outages.append(Outage(seq, shard.label, now))
            shard.traced = (0, 0)  # once it answers, it tells all of its rounds again, also those that were cut here
            self._rounds.cut(seq, shard.label, shard.heard_at or now)
            self._events.say(seq, now, "shard away", "bad", f"{shard.label} does not answer: {why}", shard.label)
        shard.answers, shard.why_not = False, why
        if self._silent_since is None and not any(one.answers for one in self._shards.values()):
            self._silent_since = now
        self._unread.add(name)

    def sample(self, now: float) -> None:
        """Add a point to the course, if one is due. Call this often."""
        if not self._course.is_due(now) or not any(shard.heard_at for shard in self._shards.values()):
            return
        here = [one for one in self._learners.values() if one.is_here]
        losses = [one.loss for one in here if one.loss is not None]
        self._course.add(
            Point(
                self._next(), round(now, 2), self.tokens_merged() or 0,
                sum(losses) / len(losses) if losses else None, min(losses, default=None), max(losses, default=None),
                len(here), round(sum(one.tokens_per_s for one in here), 1),
            )
        )  # fmt: skip

    # ------------------------------------------------------------ what the page shows

    def since(self, seq: int, now: float) -> dict[str, Any]:
        """JSON: the present state, and of what only grows what is newer than a number. 0: everything."""
        if not 0 <= seq <= self._seq:
            seq = 0
        is_whole, points = self._course.since(seq)
        return {
            "seq": self._seq,
            "now": round(now, 2),
            "began": round(self.began, 2),
            "run": self._run(),
            "headlines": self._headlines(),
            "totals": self._totals(),
            "shards": [self._shard_row(shard) for shard in self._shards.values()],
            "glance": self._glance(),
            "course": {
                "whole": is_whole,
                "points": [
                    [p.at, p.tokens_merged, p.loss, p.loss_min, p.loss_max, p.learners, p.tokens_per_s] for p in points
                ],
            },
            "rounds": [drawn.row() for drawn in self._rounds.since(seq)],
            "events": [event.row() for event in self._events.since(seq)],
            "outages": [asdict(outage) for outage in self._outages],
            "whole": seq == 0,
        }

    def learners(self, *, sort: str, descending: bool, find: str, page: int, now: float) -> dict[str, Any]:
        """One page of learners as JSON. Raises ValueError: there is no such order."""
        rows = page_of(self._learners.values(), sort=sort, descending=descending, find=find, page=page)
        return {**rows, "now": round(now, 2), "known": len(self._learners), "forgotten": self._forgotten}

    def tokens_merged(self) -> int | None:
        """Progress of the run; None: no shard has said."""
        return tokens_merged(
            [s.listing, s.status] if s.listing else [s.status] for s in self._shards.values() if s.status
        )

    # ------------------------------------------------------------ helpers

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _answers_again(self, shard: Shard, seq: int, now: float, *, is_new: bool) -> None:
        for outage in self._outages:
            if outage.shard == shard.label and outage.ended is None:
                outage.ended, outage.seq = now, seq
                if not is_new:
                    words = f"{shard.label} answers again after {now - outage.began:.0f} s"
                    self._events.say(seq, now, "shard answers", "good", words, shard.label)

    def _heard_rounds(self, shard: Shard, rounds: Answer, seq: int, now: float) -> None:
        epoch = int(rounds["epoch"])
        for facts in rounds["rounds"]:
            self._rounds.heard(seq, shard.label, epoch, facts, now)
        for facts in rounds["events"]:
            self._events.heard(seq, shard.label, facts, now)
        shard.traced = (epoch, int(rounds["seq"]))

    @property
    def _learners(self) -> dict[str, Learner]:
        """Put together once after all that was heard: it takes a look at every learner of every shard."""
        if self._unread:
            self._roll()
        return self._known

    def _roll(self) -> None:
        sights = [
            Sight(shard.label, shard.answers, shard.heard_at or 0.0, shard.status.get("learners") or (),
                  shard.past_learners)
            for shard in self._shards.values()
        ]  # fmt: skip
        self._known = put_together(sights, self._known)
        if num_forgotten := forget_most(self._known):
            self._forgotten += num_forgotten
            for shard in self._shards.values():
                shard.past_learners = {i: past for i, past in shard.past_learners.items() if i in self._known}
        self._unread.clear()

    def _run(self) -> dict[str, Any]:
        said = next((shard.status for shard in self._shards.values() if shard.status), {})
        budget = max((int(s.status.get("tokens_budget") or 0) for s in self._shards.values()), default=0)
        answered = [shard for shard in self._shards.values() if shard.status]
        return {
            "id": said.get("run"),
            "unit": next((one.unit for one in self._learners.values() if one.unit != "tokens"), "tokens"),
            "tokens_merged": self.tokens_merged(),
            "tokens_budget": budget or None,
            "done": bool(answered) and all(shard.status.get("done") for shard in answered),
            "shards_of_run": max((int(s.status.get("count") or 0) for s in answered), default=None),
            "unreached": self._unreached(),
            "silent_since": self._silent_since,
            "left_s": self._pace.left_s(budget) if self._silent_since is None else None,
        }

    def _unreached(self) -> dict[int, float]:
        """Shards that this page does not ask, and that learners say they do not reach: number -> for how many seconds.

        What is said of a shard that this page asks is left out: it knows better by itself.
        """
        asked = {int(s.status["index"]) for s in self._shards.values() if s.status.get("index") is not None}
        found: dict[int, float] = {}
        for shard in self._shards.values():
            for said in shard.status.get("learners") or () if shard.answers else ():
                for away in said.get("away") or ():
                    index = away.get("index")
                    if index is not None and index not in asked:
                        found[int(index)] = max(float(away.get("for_s") or 0.0), found.get(int(index), 0.0))
        return found

    def _totals(self) -> dict[str, Any]:
        shards = self._shards.values()
        refused: Counter[str] = sum((shard.refused for shard in shards), Counter())
        missed: Counter[str] = sum((one.missed for one in self._learners.values()), Counter())
        return {
            **{key: sum(shard.count(key) for shard in shards) for key in _COUNTERS},
            "refused": dict(refused.most_common()),
            "asked": sum(one.counts["asked"] for one in self._learners.values()),
            "merged": sum(one.counts["merged"] for one in self._learners.values()),
            "missed": dict(missed.most_common()),
            "tokens_per_s": round(sum(one.tokens_per_s for one in self._learners.values()), 1),
            "learners": dict(Counter(one.state for one in self._learners.values())),
            "forgotten": self._forgotten,
        }

    def _course_trends(self) -> list[Trend]:
        return [trend for over_s in SPANS_S if (trend := self._course.trend(over_s)) is not None]

    def _headlines(self) -> dict[str, Any]:
        return headlines(
            states=Counter(one.state for one in self._learners.values()),
            answering=sum(shard.answers for shard in self._shards.values()),
            heard=sum(bool(shard.status) for shard in self._shards.values()),
            shards_away=[shard.label for shard in self._shards.values() if not shard.answers],
            run=self._run(), totals=self._totals(),
            points=self._course.points, trends=self._course_trends(),
        )  # fmt: skip

    def _shard_row(self, shard: Shard) -> dict[str, Any]:
        said = shard.status
        fragments = said.get("fragments") or ()
        versions = [int(one["version"]) for one in fragments if not one.get("companion")]
        return {
            "name": shard.label,
            "answers": shard.answers,
            "heard_at": shard.heard_at,
            "why_not": shard.why_not,
            "ready": said.get("ready"),
            "reason": said.get("reason"),
            "starts": shard.starts,
            "uptime_s": said.get("uptime_s"),
            "fragments": [int(one["id"]) for one in fragments],
            "version_min": min(versions, default=None),
            "version_max": max(versions, default=None),
            "open_rounds": sum(bool(one.get("round_open")) for one in fragments),
            "learners": sum(one.get("state") in ("alive", "stalled") for one in said.get("learners") or ()),
            "bytes_pushed": shard.count("bytes_pushed"),
            "bytes_pulled": shard.count("bytes_pulled"),
            "memory_bytes": said.get("memory_bytes"),
            "disk_free_bytes": said.get("disk_free_bytes"),
            "bytes_saved": said.get("bytes_saved"),
            "in_memory_only": said.get("data_dir") is None if said else None,
            "unwritten": said.get("unwritten"),
            "tells_rounds": shard.traced != (0, 0),
        }

    def _glance(self) -> str:
        """One letter per learner, in the order of their ids: a picture of thousands."""
        return "".join(TAGS_OF_LEARNERS[self._learners[i].state] for i in sorted(self._learners))


def _is_another_process(old: Answer, new: Answer, passed_s: float) -> bool:
    """Whether a shard has been started again between two answers. Epochs tell; else the uptime does.

    `passed_s`: between the questions. An answer that took long, or a clock that was set, is no start.
    """
    if "epoch" in old and "epoch" in new:
        return bool(old["epoch"] != new["epoch"])
    return float(new.get("uptime_s") or 0.0) < float(old.get("uptime_s") or 0.0) + 0.5 * passed_s - 1.0
