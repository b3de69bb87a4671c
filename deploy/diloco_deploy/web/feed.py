"""Turns answers of shards into the page's state, and into its changes since a given number.

Pure: `live_page.py` passes in answers and the time (seconds since 1970), and sends what `since` returns. A member that
stops answering stays, with the time since then. Nothing is guessed: values that no shard has reported are null.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, NamedTuple

from diloco_deploy.cluster.findings import findings
from diloco_deploy.cluster.members import STATES, SeenLearner, SeenMember, Status
from diloco_deploy.cluster.model import Cluster, Pace
from diloco_deploy.web.drawn import EVENTS_MAX, Course, DrawnRounds, Events, Point
from diloco_deploy.web.headlines import WORDS, headlines

PAGE = 50
"""Rows of the table, and findings, in one answer."""
_COUNTERS = ("rounds", "duplicates", "evictions", "versions_lost", "bytes_pushed", "bytes_pulled")
_AS_SAID = ("ready", "reason", "uptime_s", "memory_bytes", "disk_free_bytes", "bytes_saved")
"""Fields copied from a shard's status."""


@dataclass
class Outage:
    seq: int
    shard: str
    began: float
    ended: float | None = None


class Feed:
    """The state of one run's page. Owned by one event loop."""

    def __init__(self, now: float) -> None:
        self.began = now
        self._seq = 1  # grows with every change; a new page starts from 0
        self._cluster = Cluster()
        self._traced: dict[str, tuple[int, int]] = {}  # shard -> epoch and number up to which its rounds are known
        self._course = Course()
        self._pace = Pace()
        self._rounds = DrawnRounds()
        self._events = Events()
        self._outages: deque[Outage] = deque(maxlen=EVENTS_MAX)
        self._silent_since: float | None = now

    # ------------------------------------------------------------ answers of shards

    def expect(self, shards: Iterable[str], learners: Iterable[str] = ()) -> None:
        """Set the members of the run. Earlier ones stay, as away."""
        for name in shards:
            self._cluster.expect(name, "shard")
        for learner_id in learners:
            self._cluster.await_learner(learner_id)

    def traced(self, name: str) -> tuple[int, int]:
        """The epoch and number from which to ask a shard for new rounds."""
        return self._traced.get(name, (0, 0))

    def heard(self, name: str, status: Status, rounds: Status | None, now: float, asked_at: float) -> None:
        """A shard answered. `rounds`: its rounds and events; None: it reports none. `asked_at`: by a monotonic clock.

        Raises an error of any kind, and changes nothing, if the answer is not a shard's.
        """
        trial = Feed(now)  # try it alone first: one odd answer must not break the page
        trial.expect([name])
        trial._take(name, status, rounds, now, asked_at)
        trial.sample(now)
        trial.learners(sort="attention", descending=False, find="", page=0, now=now)
        trial.since(0, now)
        self._take(name, status, rounds, now, asked_at)

    def _take(self, name: str, status: Status, rounds: Status | None, now: float, asked_at: float) -> None:
        shard, seq = self._cluster.members[name], self._next()
        is_new, started_at = shard.is_succeeded_by(status, asked_at), now - float(status.get("uptime_s") or 0.0)
        if is_new:
            self._cluster.begins_anew(name)
            self._rounds.cut(seq, shard.label, shard.heard_at or now)
            self._events.say(seq, started_at, "shard started", "good", f"{shard.label} started again", shard.label)
        if shard.why_not:
            self._answers_again(shard, seq, now, is_new=is_new)
        if shard.heard_at is None and all(one.label != status.get("name") for one in self._cluster.shards):
            shard.label = str(status.get("name") or name)
        self._cluster.heard(name, status, now, asked_at)
        self._cluster.process(name, "up")
        self._pace.heard(now, self._cluster.tokens_merged or 0)
        self._silent_since = None
        if rounds is not None:
            self._heard_rounds(shard, rounds, seq, now)

    def silent(self, name: str, why: str, now: float, code: str = "") -> None:
        """A shard did not answer; `why` in words, `code` if known."""
        shard, seq = self._cluster.members[name], self._next()
        if shard.answers:
            self._outages.append(Outage(seq, shard.label, now))
            self._traced.pop(name, None)  # when it answers again, ask for all its rounds
            self._rounds.cut(seq, shard.label, shard.heard_at or now)
            self._events.say(seq, now, "shard away", "bad", f"{shard.label} does not answer: {why}", shard.label)
        self._cluster.process(name, "away", why, code)
        if self._silent_since is None and not any(one.answers for one in self._cluster.shards):
            self._silent_since = now

    def sample(self, now: float) -> None:
        """Add a point to the course, if one is due. Call this often."""
        if not self._course.is_due(now) or not any(shard.heard_at for shard in self._cluster.shards):
            return
        here = [one for one in self._learners if one.is_here]
        losses = [one.loss for one in here if one.loss is not None]
        self._course.add(
            Point(
                self._next(), round(now, 2), self._cluster.tokens_merged or 0,
                sum(losses) / len(losses) if losses else None, min(losses, default=None), max(losses, default=None),
                len(here), round(sum(one.tokens_per_s for one in here), 1),
            )
        )  # fmt: skip

    # ------------------------------------------------------------ the page

    def since(self, seq: int, now: float) -> dict[str, Any]:
        """The current state as JSON, with points, rounds and events newer than number `seq`; 0: all of them."""
        if not 0 <= seq <= self._seq:
            seq = 0
        is_whole, points = self._course.since(seq)
        run, totals, states = self._run(), self._totals(), Counter(one.state for one in self._learners)
        wrong = findings(self._cluster, now, silent_after_s=inf)  # `silent` reports silence
        shards = self._cluster.shards
        return {
            "seq": self._seq,
            "now": round(now, 2),
            "began": round(self.began, 2),
            "run": run,
            "headlines": headlines(
                states=states, answering=sum(shard.answers for shard in shards),
                heard=sum(bool(shard.status) for shard in shards),
                shards_away=[shard.label for shard in shards if not shard.answers], wrong=wrong,
                run=run, totals=totals, points=self._course.points,
            ),
            "findings": [asdict(one) for one in wrong[:PAGE]],
            "findings_more": max(0, len(wrong) - PAGE),
            "totals": {**totals, "learners": dict(states)},
            "shards": [self._shard_row(shard) for shard in shards],
            "glance": "".join(WORDS[one.state].letter for _, one in sorted(self._cluster.learners.items())),
            "titles": {words.letter: words.title for words in WORDS.values()},
            "course": {"whole": is_whole, "points": [point.row() for point in points]},
            "rounds": [drawn.row() for drawn in self._rounds.since(seq)],
            "events": [event.row() for event in self._events.since(seq)],
            "outages": [asdict(outage) for outage in self._outages],
            "whole": seq == 0,
        }  # fmt: skip

    def learners(self, *, sort: str, descending: bool, find: str, page: int, now: float) -> dict[str, Any]:
        """One page of learners as JSON. Raises ValueError for an unknown order."""
        if sort not in _ORDERS:
            raise ValueError(f"sort: one of {', '.join(_ORDERS)}")
        wanted = [one for one in self._learners if find.lower() in one.learner_id.lower()]
        wanted.sort(key=lambda one: one.learner_id)
        wanted.sort(key=_ORDERS[sort], reverse=descending)
        pages = max(1, -(-len(wanted) // PAGE))
        page = min(max(0, page), pages - 1)
        rows = [_row(one) for one in wanted[page * PAGE : (page + 1) * PAGE]]
        return {
            "columns": [column._asdict() for column in COLUMNS],
            "total": len(wanted), "page": page, "pages": pages, "rows": rows, "now": round(now, 2),
            "known": len(self._learners), "forgotten": self._cluster.forgotten,
        }  # fmt: skip

    # ------------------------------------------------------------ helpers

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _answers_again(self, shard: SeenMember, seq: int, now: float, *, is_new: bool) -> None:
        for outage in self._outages:
            if outage.shard == shard.label and outage.ended is None:
                outage.ended, outage.seq = now, seq
                if not is_new:
                    words = f"{shard.label} answers again after {now - outage.began:.0f} s"
                    self._events.say(seq, now, "shard answers", "good", words, shard.label)

    def _heard_rounds(self, shard: SeenMember, rounds: Status, seq: int, now: float) -> None:
        epoch = int(rounds["epoch"])
        for facts in rounds["rounds"]:
            self._rounds.heard(seq, shard.label, epoch, facts, now)
        for facts in rounds["events"]:
            self._events.heard(seq, shard.label, facts, now)
        self._traced[shard.name] = (epoch, int(rounds["seq"]))

    @property
    def _learners(self) -> list[SeenLearner]:
        return list(self._cluster.learners.values())

    def _run(self) -> dict[str, Any]:
        answered = [shard for shard in self._cluster.shards if shard.status]
        budget = self._cluster.tokens_budget
        return {
            "id": next((shard.get("run") for shard in answered), None),
            "unit": next((one.unit for one in self._learners if one.unit != "tokens"), "tokens"),
            "tokens_merged": self._cluster.tokens_merged,
            "tokens_budget": budget or None,
            "done": bool(answered) and all(shard.get("done") for shard in answered),
            "shards_of_run": max((int(shard.get("count", 0)) for shard in answered), default=None),
            "silent_since": self._silent_since,
            "left_s": self._pace.left_s(budget) if self._silent_since is None else None,
        }

    def _totals(self) -> dict[str, Any]:
        refused: Counter[str] = sum((shard.refused for shard in self._cluster.shards), Counter())
        missed: Counter[str] = sum((one.missed for one in self._learners), Counter())
        return {
            **{key: self._cluster.count(key) for key in _COUNTERS},
            "refused": dict(refused.most_common()),
            "asked": sum(one.counts["asked"] for one in self._learners),
            "merged": sum(one.counts["merged"] for one in self._learners),
            "missed": dict(missed.most_common()),
            "tokens_per_s": round(sum(one.tokens_per_s for one in self._learners), 1),
            "forgotten": self._cluster.forgotten,
        }

    def _shard_row(self, shard: SeenMember) -> dict[str, Any]:
        low, high = shard.versions or (None, None)
        return {
            "name": shard.label,
            "answers": shard.answers,
            "heard_at": shard.heard_at,
            "why_not": shard.why_not,
            **{key: shard.get(key) for key in _AS_SAID},
            "starts": shard.starts + bool(shard.status),
            "fragments": [int(one["id"]) for one in shard.get("fragments", ())],
            "version_min": low,
            "version_max": high,
            "open_rounds": shard.open_rounds,
            "sync_every": shard.get("sync_every"),
            "learners": shard.learners_held,
            "readers": Counter(f"{one.role} {one.state}" for one in shard.followers),
            "bytes_pushed": shard.count("bytes_pushed"),
            "bytes_pulled": shard.count("bytes_pulled"),
            "in_memory_only": shard.get("data_dir") is None if shard.status else None,
            "tells_rounds": shard.name in self._traced,
        }


class Column(NamedTuple):
    title: str
    key: str
    """Key of a row, and of an order."""
    kind: str
    """How learners.js draws it."""
    word: str = ""
    unit: str = ""
    """The title with `*` for "tokens", if learners count something else."""
    wide: bool = False


COLUMNS = (
    Column("learner", "id", "text", "learner"),
    Column("state", "attention", "state", "state"),
    Column("step", "step", "count", "inner step, H", wide=True),
    Column("tokens/s", "speed", "rate", "token", "*/s"),
    Column("loss", "loss", "loss"),
    Column("staleness", "staleness", "number", "staleness", wide=True),
    Column("contributions", "merged", "fate", "fate"),
)


def _row(one: SeenLearner) -> dict[str, Any]:
    return {
        "id": one.learner_id,
        "state": one.state,
        "level": WORDS[one.state].level,
        "word": WORDS[one.state].pill,
        "heard_at": round(max(0.0, one.heard_at), 1),
        "away_at": list(one.away_at),
        "step": one.inner_step if one.heard_at > 0 else None,
        "tokens": one.tokens,
        "loss": one.loss,
        "speed": round(one.tokens_per_s, 1),
        "staleness": one.staleness,
        "asked": one.counts["asked"],
        "merged": one.counts["merged"],
        "missed": dict(one.missed.most_common()),
    }


_ORDERS = {
    "attention": lambda one: STATES.index(one.state),
    "id": lambda one: one.learner_id,
    "step": lambda one: one.inner_step,
    "speed": lambda one: one.tokens_per_s,
    "loss": lambda one: float("inf") if one.loss is None else one.loss,
    "staleness": lambda one: -1 if one.staleness is None else one.staleness,
    "merged": lambda one: one.counts["merged"],
    "heard": lambda one: one.heard_at,
}
