"""Where the alive worker-seconds went of which no token is in the model, in seconds of the fault-free pace.

Every loss is read from the histories but the last one, which is what is left: so they sum to what goodput lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diloco_deploy.chaos.cluster import Course
from diloco_deploy.chaos.goodput import Work, alive_times, death_of, steps_of, tokens_at, tokens_merged
from diloco_deploy.chaos.histories import Histories, Life
from diloco_deploy.chaos.plan import LINK

LOSSES = {
    "joining": "joining: from asking to join to the beginning of the first inner step",
    "cut_short": "inner steps cut short by a kill",
    "died_unmerged": "trained, but not merged yet when its worker was killed",
    "died_shard_away": "the same, where the shard had been away, or cut off, since",
    "never_merged": "trained by workers that live, and not merged",
    "slower": "inner steps slower than without faults, and what was in hand when the time began and ended",
}
"""Key of the result -> what it counts."""


def account(histories: Histories, course: Course, work: Work, baseline: dict[str, Any]) -> dict[str, float]:
    """Worker-seconds that goodput lacks, by cause, as in LOSSES. `baseline`: as of result.py."""
    pace, step_s = baseline["tokens_per_alive_s"], baseline["step_s"]
    lost = dict.fromkeys(LOSSES, 0.0)
    merged, fragments = tokens_merged(histories, course), histories.num_fragments
    away = _away(histories, course)
    trained = 0.0
    for life in histories.worker_lives():
        alive = list(alive_times(life, course))
        if not alive:
            continue
        lost["joining"] += _joining_s(life, alive, step_s)
        killed_at = death_of(life, course)
        killed = killed_at <= course.ended
        if killed and (steps := steps_of(life)):
            lost["cut_short"] += killed_at - max(course.began, steps[-1])
        low, high = tokens_at(life, course.began), tokens_at(life, course.ended)
        trained += high - low
        for fragment, shard in histories.owners.items():
            missing = high - low - merged.get((life.name, life.number, fragment), 0)
            since = _reached(life, high - missing)
            if not killed:
                cause = "never_merged"
            elif any(begin < killed_at and since < end for begin, end in away.get((shard, life.name), ())):
                cause = "died_shard_away"
            else:
                cause = "died_unmerged"
            lost[cause] += missing / fragments / pace
    lost["slower"] = work.alive_s - lost["joining"] - lost["cut_short"] - trained / pace
    return {name: round(seconds, 2) for name, seconds in lost.items()}


def _joining_s(life: Life, alive: list[tuple[float, float]], step_s: float) -> float:
    """Seconds of its alive times before it began its first inner step."""
    first = next(iter(steps_of(life)), float("inf")) - step_s
    return sum(max(0.0, min(end, first) - begin) for begin, end in alive)


def _reached(life: Life, tokens: int) -> float:
    """When the learner's own count was this or more."""
    return next((float(line["t"]) for line in life.of("born", "stepped") if line["tokens"] >= tokens), life.began)


def _away(histories: Histories, course: Course) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Shard and worker -> when the worker could not reach it: from the fault until its next version."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for deed in course.deeds:
        for shard, workers in _hurt(histories, deed.target):
            end = _next_version(histories, shard, deed.ended, course)
            for worker in workers:
                found.setdefault((shard, worker), []).append((deed.began, end))
    return found


def _hurt(histories: Histories, target: str) -> Iterator[tuple[str, list[str]]]:
    """Shards that a fault of this target takes away, and from which workers."""
    if target in histories.shards:
        yield target, list(histories.workers)
    elif LINK in target:
        worker, shard = target.split(LINK)
        yield shard, [worker]


def _next_version(histories: Histories, shard: str, after: float, course: Course) -> float:
    times = (float(line["t"]) for life in histories.shards[shard] for line in life.of("announced"))
    return min((t for t in times if t >= after), default=course.ended)
