"""Who ought to be in a cluster, and who is: from answers, the record of `diloco up`, and what shards hear. Pure.

Shards do not know each other. Each knows how many there are, and hears from its learners which of the others they do
not reach. So one shard that answers is enough to miss another one.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_common.endpoints import Role
from diloco_deploy import units
from diloco_deploy.progress import Status
from diloco_deploy.snapshot import Member, Snapshot
from diloco_deploy.standing import tokens_per_s
from diloco_deploy.status_schema import ClusterRecord, MemberRecord, Presence, Problem

_ROLES: dict[bool, Role] = {True: "worker", False: "shard"}


@dataclass(frozen=True)
class Present:
    """One member, and what is known of it."""

    name: str
    role: Role
    presence: Presence
    state: str = ""
    """One word that says more than `presence`, such as "no answer"; empty: it is told from the answer."""
    since_s: float | None = None
    why: str = ""
    status: Status | None = None
    answered: bool = False
    restarts: int = 0
    is_kept_up: bool = False
    """`diloco up` starts it again when it ends."""

    @property
    def is_missing(self) -> bool:
        return self.presence in ("away", "dead", "starting", "unknown")

    def as_member(self) -> Member:
        """As the tables show it."""
        if self.presence == "alive" and self.status is None:
            return Member(self.name, self.role, "heard", None)  # learners reach it; we did not ask it
        if self.presence == "alive":
            return Member(self.name, self.role, "up", self.status)
        word = self.state or self.presence
        age = f" {units.clock(self.since_s)}" if self.since_s is not None else ""
        return Member(self.name, self.role, word + age, self.status)


def roll_call(
    asked: Mapping[str, str], answers: Mapping[str, Status], record: ClusterRecord | None, now: float
) -> list[Present]:
    """All members, shards first.

    Args:
        asked: name (or address, where no name is known) -> address.
        answers: the answers of /status, by the same names.
        record: that of `diloco up`; None: there is none.
        now: unix time.
    """
    heard = {str(status.get("name") or name): status for name, status in answers.items()}
    silent = {name: address for name, address in asked.items() if name not in answers}
    shards = [status for status in heard.values() if status.get("role") == "shard"]
    found = [*_shards(shards, silent, record, now), *_workers(heard, shards, silent, record, now)]
    named = {present.name for present in found}
    found += [
        Present(name, _ROLES[name.startswith("worker")], "away", "no answer", why=f"nobody answers at {address}")
        for name, address in silent.items()
        if name not in named and not any(address in present.why for present in found)
    ]
    return sorted(found, key=lambda present: (present.role, _natural(present.name)))


def _natural(name: str) -> list[tuple[int, str]]:
    """worker-2 before worker-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def problems(present: Sequence[Present]) -> list[Problem]:
    """What a person would want to know of those who are missing, worst first."""
    count = sum(one.role == "shard" for one in present)
    found = [_problem(one, count) for one in present if one.is_missing and one.role == "shard"]
    return found + [_problem(one, count) for one in present if one.is_missing and one.role == "worker"]


def _problem(one: Present, shards: int) -> Problem:
    age = f" for {units.clock(one.since_s)}" if one.since_s is not None else ""
    state = {"dead": f"dead{age}", "starting": "starting", "unknown": "unknown"}.get(one.presence, f"away{age}")
    because = f" ({one.why})" if one.why else ""
    again = _again(one)
    if one.role == "worker":
        return Problem(
            code="WORKER_AWAY", member=one.name,
            words=f"{one.name} is {state}{because}: the others train on; {again}",
        )  # fmt: skip
    if one.presence == "unknown":
        return Problem(
            code="SHARD_UNKNOWN", member=one.name,
            words=f"{one.name} was not asked, and nobody speaks of it: add its address to --http",
        )  # fmt: skip
    share = {1: "the whole model", 2: "half of the model"}.get(shards, f"a {_nth(shards)} of the model")
    return Problem(
        code="SHARD_AWAY", member=one.name,
        words=f"{one.name} is {state}{because}: {share} is away and gets no new versions; learners train on and lose "
        f"nothing; {again}",
    )  # fmt: skip


def _again(one: Present) -> str:
    """Who starts it again."""
    if one.presence == "starting":
        return "wait: `diloco up` starts it"
    if one.state == "lost":
        return f"`diloco up` has given it up: look at `diloco logs {one.name}`"
    if one.is_kept_up:
        return "if `diloco up` still runs, it starts it again"
    return "start it again" + (" with its data folder" if one.role == "shard" else ", and it goes on")


def _nth(count: int) -> str:
    return {3: "third", 4: "quarter"}.get(count, f"{count}th part")


# ---------------------------------------------------------------- shards


def _shards(
    shards: Sequence[Status], silent: Mapping[str, str], record: ClusterRecord | None, now: float
) -> Iterator[Present]:
    count = max([int(shard.get("count") or 0) for shard in shards] + [record.shards if record else 0])
    by_index = {int(shard["index"]): shard for shard in shards if shard.get("index") is not None}
    strays = [shard for shard in shards if shard.get("index") is None]  # of an older version
    names = [f"shard-{index}" for index in range(count)]
    missing = [index for index in range(count) if index not in by_index and names[index] not in silent]
    unnamed = [name for name in silent if ":" in name]
    for shard in strays:
        yield Present(str(shard.get("name")), "shard", "alive", status=shard, answered=True)
    for index, name in enumerate(names):
        if (status := by_index.get(index)) is not None:
            yield Present(name, "shard", "alive", status=status, answered=True, restarts=_restarts(name, record))
            continue
        one = _by_record(name, "shard", record, now) or _by_learners(name, index, shards)
        address = silent.get(name) or (unnamed[0] if len(unnamed) == len(missing) == 1 and index in missing else "")
        if address:
            said = f"nobody answers at {address}" + (f"; {one.why}" if one.why else "")
            presence: Presence = "away" if one.presence in ("alive", "unknown") else one.presence
            one = replace(
                one, presence=presence, state=one.state or ("no answer" if presence == "away" else ""), why=said
            )
        yield replace(one, is_kept_up=_is_kept_up(name, record))


def _by_learners(name: str, index: int, shards: Sequence[Status]) -> Present:
    """What learners say of a shard to the others."""
    by_learner: dict[str, float | None] = {}  # learner -> for how long it has not reached it; None: it does
    for shard in shards:
        for learner in _alive(shard):
            if (said := learner.get("away")) is not None:
                by_learner[str(learner["id"])] = _away_s(said, index)
    gone = [for_s for for_s in by_learner.values() if for_s is not None]
    if not by_learner:
        return Present(name, "shard", "unknown", "not asked")
    if 2 * len(gone) > len(by_learner):
        why = f"{len(gone)} of {len(by_learner)} learners do not reach it"
        return Present(name, "shard", "away", since_s=statistics.median(gone), why=why)
    why = f"{len(by_learner) - len(gone)} of {len(by_learner)} learners reach it"
    return Present(name, "shard", "alive", why=why)


def _away_s(said: Sequence[Mapping[str, Any]], index: int) -> float | None:
    """For how long a learner has not reached a shard that did not answer us. One that it never reached has no index."""
    named = {a.get("index"): float(a["for_s"]) for a in said}
    return named.get(index, named.get(None))


def _alive(shard: Status) -> Iterator[Mapping[str, Any]]:
    return (learner for learner in shard.get("learners", ()) if learner.get("state") in ("alive", "stalled"))


# ---------------------------------------------------------------- workers


def _workers(
    heard: Mapping[str, Status],
    shards: Sequence[Status],
    silent: Mapping[str, str],
    record: ClusterRecord | None,
    now: float,
) -> Iterator[Present]:
    own = {name: status for name, status in heard.items() if status.get("role") == "worker"}
    known = _learners(shards)
    recorded = [name for name, one in record.members.items() if one.role == "worker"] if record else []
    names = dict.fromkeys([*recorded, *own, *known, *(name for name in silent if name.startswith("worker"))])
    for name in names:
        if name in own:
            yield Present(name, "worker", "alive", status=own[name], answered=True, restarts=_restarts(name, record))
            continue
        if (one := _by_record(name, "worker", record, now)) is not None:
            one = replace(one, status=known[name].status if name in known else None)
        elif name in known:
            one = known[name]
        else:
            why = f"nobody answers at {silent.get(name, 'its address')}"
            one = Present(name, "worker", "away", "no answer", why=why)
        yield replace(one, is_kept_up=_is_kept_up(name, record))


def _learners(shards: Sequence[Status]) -> dict[str, Present]:
    """What shards know of their learners."""
    seen: dict[str, list[Mapping[str, Any]]] = {}
    for shard in shards:
        for learner in shard.get("learners", ()):
            seen.setdefault(str(learner["id"]), []).append(learner)
    return {name: _learner(name, views) for name, views in sorted(seen.items())}


def _learner(name: str, views: Sequence[Mapping[str, Any]]) -> Present:
    states = [str(view.get("state")) for view in views]
    status = _as_status(name, views)
    silent_s = min(float(view.get("silent_s") or 0.0) for view in views)
    where = f"{len(views)} shard{'s' if len(views) > 1 else ''}"
    if any(state in ("alive", "stalled") for state in states):
        return Present(name, "worker", "alive", why=f"heard by {where}", status=status)
    if set(states) == {"left"}:
        return Present(name, "worker", "left", "left", status=status)
    return Present(name, "worker", "away", "away", silent_s, why=f"evicted by {where}", status=status)


def _as_status(name: str, views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What /status of a worker would say, as far as shards know it."""
    last = max(views, key=lambda view: (int(view.get("inner_step") or 0), -float(view.get("silent_s") or 0.0)))
    step, step_s = int(last.get("inner_step") or 0), float(last.get("step_time_s") or 0.0)
    tokens = int(last.get("tokens") or 0)
    return {
        "role": "worker", "name": name, "state": "training" if last.get("state") == "alive" else last.get("state"),
        "inner_step": step, "tokens": tokens, "unit": last.get("unit"), "loss": last.get("loss"), "step_time_s": step_s,
        "tokens_per_s": tokens_per_s(tokens, step, step_s),
        "contributions": {
            "merged": sum(int(view.get("merged") or 0) for view in views),
            "late": sum(_count(view.get("missed", {}), "LATE") for view in views),
        },
        "from": "shards",
    }  # fmt: skip


def _count(missed: Mapping[str, Any], code: str) -> int:
    return int(missed.get(code) or missed.get(code.lower()) or 0)


# ---------------------------------------------------------------- the record


def _recorded(name: str, record: ClusterRecord | None) -> MemberRecord | None:
    return record.members.get(name) if record else None


def _restarts(name: str, record: ClusterRecord | None) -> int:
    one = _recorded(name, record)
    return one.restarts if one else 0


def _is_kept_up(name: str, record: ClusterRecord | None) -> bool:
    one = _recorded(name, record)
    return one is not None and one.process != "lost"


def _by_record(name: str, role: Role, record: ClusterRecord | None, now: float) -> Present | None:
    """What `diloco up` says of a process that did not answer; None: it says nothing, or that it is up."""
    one = _recorded(name, record)
    if one is None or one.process == "up":
        return None
    presence: Presence = {"died": "dead", "lost": "dead", "ended": "left"}.get(one.process, "starting")  # type: ignore[assignment]
    since_s = max(0.0, now - one.since)
    return Present(
        name, role, presence, one.process, since_s if presence == "dead" else None, one.why, restarts=one.restarts
    )


def expected_workers(present: Iterable[Present]) -> int:
    """Those that are there, or ought to be."""
    return sum(one.role == "worker" and one.presence != "left" for one in present)


def as_snapshot(present: Iterable[Present]) -> Snapshot:
    """For the tables and the sums. The run is as old as the process that has run for longest."""
    members = tuple(one.as_member() for one in present)
    elapsed_s = max((float(member.get("uptime_s", 0.0)) for member in members), default=0.0)
    return Snapshot(members, elapsed_s, doing="running")
