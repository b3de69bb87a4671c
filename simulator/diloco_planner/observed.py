"""A recorded run as plans of learners and shards, and what would have come of it otherwise.

Who was there and when, how long a step took, how fast bytes came and went, and how long a merge took are read from the
decisions of the first shard (`replay.py`). The world of durations then decides with production's cores, for the run's
own settings and for others. What a run came to by the record stands beside both: so the error is seen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, pstdev

from diloco_common.codec import num_payload_bytes
from diloco_common.errors import DataError
from diloco_common.observe.histories import Line
from diloco_common.settings import Settings, SyncSettings
from diloco_common.wire.manifest import TensorSpec
from diloco_common.wire.messages import Outcome as Became
from diloco_planner.chips import Island, Timeline
from diloco_planner.plans import LearnerPlan, Link, ShardPlan
from diloco_planner.world import World

QUICK_S = 0.002
"""A push or a pull that is quicker tells nothing of a link."""
NOISE_MAX = 0.5
SAID_GOODBYE = ("LEFT", "SUPERSEDED", "STALE_GENERATION")
"""Ends of a lease that are no evictions."""


@dataclass(frozen=True)
class Result:
    """What a run came to, by the record or by the simulation."""

    tokens_trained: float
    tokens_merged: float
    """Averaged over fragments."""
    rounds: float
    participants_mean: float
    late_share: float
    evictions: float


@dataclass
class Observed:
    """One run."""

    settings: Settings
    params: int
    learners: list[LearnerPlan]
    shards: int
    recorded: int
    """Of them."""
    merge_bytes_s: float
    seconds: float
    result: Result

    def simulate(self, settings: Settings, shards: int, seed: int = 0) -> Result:
        """What the same learners come to with these settings and so many shards."""
        plan, budget = ShardPlan(shards, self.merge_bytes_s), settings.run.tokens
        world = World(settings, self.params, self.learners, plan, self.seconds, seed, budget_tokens=budget)
        found = world.run()
        return Result(
            found.tokens_trained, found.tokens_trained * found.tokens_share_merged, found.rounds,
            found.participants_mean, found.late_share, found.evictions,
        )  # fmt: skip


def observe(shards: Mapping[str, Sequence[Sequence[Line]]]) -> Observed:
    """Of the lines that `replay.read` gives. Raises DataError: nothing was trained in it."""
    lives = [life for of_one in shards.values() for life in of_one]
    began, ended = min(life[0]["t"] for life in lives), max(life[-1]["t"] for life in lives)
    settings = Settings.model_validate(lives[0][0]["settings"])
    seen, speeds = defaultdict[str, _Seen](_Seen), _Speeds(settings.sync)
    first = [line for life in next(iter(shards.values())) for line in life]
    for line in first:
        _hear(seen, line)
        speeds.hear(line)
    trained = {name: one for name, one in sorted(seen.items()) if one.timed}
    if not trained:
        raise DataError("no learner has trained in this run, so there is nothing to simulate")
    plans = [one.plan(name, began, ended, speeds.link(name)) for name, one in trained.items()]
    tensors = next([TensorSpec(*t) for t in line["given"]["tensors"]] for line in first if line["what"] == "join")
    params = sum(math.prod(t.shape) for t in tensors if t.kind == "parameter")
    tokens = sum(one.tokens for one in seen.values())
    return Observed(
        settings,
        params,
        plans,
        settings.shard.count,
        len(shards),
        speeds.merge_bytes_s,
        ended - began,
        _result(lives, first, tokens),
    )  # fmt: skip


# ------------------------------------------------------------------ learners


@dataclass
class _Session:
    """One process, in seconds."""

    joined: float
    last: float
    """When it reported last."""
    first: tuple[float, int] | None = None
    """When it reported a step first, and how many it had taken by then."""

    def begun(self, step_s: float) -> float:
        """To train: it has all versions by then."""
        return max(self.joined, self.first[0] - self.first[1] * step_s) if self.first is not None else self.last


@dataclass
class _Seen:
    """One learner."""

    sessions: list[_Session] = field(default_factory=list)
    """One per process."""
    process: str = ""
    last: tuple[float, int, int] | None = None
    """When its process reported last that it had stepped; its steps and tokens then."""
    seconds: float = 0.0
    """Of the steps that are `timed`."""
    timed: int = 0
    steps: int = 0
    tokens: int = 0
    single: list[float] = field(default_factory=list)
    """Seconds between reports one step apart."""
    says_goodbye: bool = False

    def joined(self, process: str, at: float) -> None:
        if self.process != process:
            self.process, self.last = process, None
            self.sessions.append(_Session(at, at))

    def reported(self, steps: int, tokens: int, at: float) -> None:
        if self.last is not None:
            since, steps_before, tokens_before = self.last
            if steps <= steps_before:
                return
            if steps_before:  # before the first step it got all versions
                self.seconds += at - since
                self.timed += steps - steps_before
            self.steps += steps - steps_before
            self.tokens += tokens - tokens_before
            if steps == steps_before + 1:
                self.single.append(at - since)
        self.last = at, steps, tokens
        session = self.sessions[-1]
        session.last = at
        if steps and session.first is None:
            session.first = at, steps

    def plan(self, name: str, began: float, ended: float, link: Link) -> LearnerPlan:
        """Steps of its usual length, except where it was away."""
        step_s, begins = self.seconds / self.timed, self.sessions[0].joined
        noise = min(NOISE_MAX, pstdev(self.single) / step_s) if len(self.single) > 8 else 0.0
        away = [(a.last, b.joined, False) for a, b in pairwise(self.sessions)]
        last = self.sessions[-1].last
        if ended - last > 3 * step_s:
            away.append((last, ended, self.says_goodbye))
        line = Timeline(ended - begins)
        for session in self.sessions:
            line.change(session.joined - begins, 0.0)
            line.change(session.begun(step_s) - begins, 1.0)
            line.change(session.last - begins, 0.0)
        for gone, back, says_goodbye in away:
            line.away.append((gone - begins, back - begins, says_goodbye))
            line.interruptions += 1
        line.freeze()
        return LearnerPlan(
            name, Island(1), step_s=step_s, noise=noise, link=link, begins_s=begins - began,
            tokens_per_step=max(1, round(self.tokens / self.steps)), line=line,
        )  # fmt: skip


def _hear(seen: Mapping[str, _Seen], line: Line) -> None:
    given = line.get("given", {})
    match line["what"]:
        case "join" if "refused" not in line:
            seen[given["learner_id"]].joined(given["process_id"], line["t"])
        case "progress":
            progress = given["progress"]
            seen[given["member"][0]].reported(progress["inner_step"], progress["tokens"], line["t"])
        case "leave":
            seen[given["member"][0]].says_goodbye = True


# ------------------------------------------------------------------ links and merges


class _Speeds:
    """How fast bytes came, went and were merged: medians."""

    def __init__(self, sync: SyncSettings) -> None:
        self._sync = sync
        self._up = defaultdict[str, list[float]](list)
        self._down = defaultdict[str, list[float]](list)
        self._merges: list[float] = []
        self._admitted: dict[tuple[str, int, int], float] = {}
        self._announced: dict[tuple[int, int], float] = {}
        self._merging: dict[int, tuple[float, int]] = {}
        self._elements: dict[int, int] = {}

    def link(self, learner: str) -> Link:
        """Bits per second; infinite where every push or pull was too quick to tell."""
        return Link(*(8 * median(ways[learner]) if learner in ways else math.inf for ways in (self._up, self._down)))

    @property
    def merge_bytes_s(self) -> float:
        return median(self._merges) if self._merges else ShardPlan().merge_bytes_s

    def hear(self, line: Line) -> None:
        given, at = line.get("given", {}), line["t"]
        match line["what"]:
            case "admit" if line.get("gave", 0) is None:
                self._admitted[_name(given)] = at
            case "contribute" if "refused" not in line:
                self._came(given, at)
            case "committed":
                record = given["record"]
                self._committed(record["fragment_id"], record["version"], at)
            case "pulled":
                begun, elements = self._announced.get((given["fragment_id"], given["version"])), self._of(given)
                if begun is not None and elements and at - begun > QUICK_S:
                    self._down[given["member"][0]].append(num_payload_bytes(self._sync.pull, elements) / (at - begun))
            case "did":
                merging = (effect for effect in line["effects"] if effect[0] == "MergeRound")
                self._merging |= {fragment_id: (at, len(merged)) for _, fragment_id, _, merged, *_ in merging}

    def _of(self, given: Mapping[str, int]) -> int:
        return self._elements.get(given["fragment_id"], 0)

    def _came(self, given: Line, at: float) -> None:
        payload, begun = given["header"]["payload"], self._admitted.pop(_name(given), None)
        self._elements[given["header"]["fragment_id"]] = payload["num_elements"]
        if begun is not None and at - begun > QUICK_S:
            self._up[given["member"][0]].append(payload["num_bytes"] / (at - begun))

    def _committed(self, fragment_id: int, version: int, at: float) -> None:
        self._announced[fragment_id, version] = at
        begun, contributions = self._merging.pop(fragment_id, (at, 0))
        elements = self._elements.get(fragment_id, 0)
        if elements and at > begun:
            push, pull = (num_payload_bytes(encoding, elements) for encoding in (self._sync.push, self._sync.pull))
            self._merges.append((contributions * push + pull) / (at - begun))


def _name(given: Line) -> tuple[str, int, int]:
    """Of a contribution."""
    return given["member"][0], given["header"]["fragment_id"], given["header"]["round"]


# ------------------------------------------------------------------ what it came to


def _result(lives: Iterable[Sequence[Line]], first: Iterable[Line], tokens_trained: int) -> Result:
    rounds = participants = late = accepted = 0
    merged: dict[int, int] = {}
    for line in (line for life in lives for line in life):
        match line["what"]:
            case "committed":
                record = line["given"]["record"]
                rounds, merged[record["fragment_id"]] = rounds + 1, record["tokens_merged"]
            case "admit" | "contribute" if line.get("gave"):
                late += line["gave"]["outcome"] == Became.LATE.value
                is_seed = line["given"]["header"]["round"] == 0
                accepted += line["gave"]["outcome"] == Became.ACCEPTED.value and not is_seed
            case "did":
                participants += sum(len(effect[3]) for effect in line["effects"] if effect[0] == "MergeRound")
    return Result(
        tokens_trained, sum(merged.values()) / max(1, len(merged)), rounds, participants / max(1, rounds),
        late / max(1, late + accepted), sum(code not in SAID_GOODBYE for code in _ends(first)),
    )  # fmt: skip


def _ends(lines: Iterable[Line]) -> Iterator[str]:
    """Why leases ended, at the first shard: each shard ends them by itself."""
    for line in lines:
        if line["what"] == "did":
            yield from (effect[1]["code"] for effect in line["effects"] if effect[0] == "LearnerGone")
