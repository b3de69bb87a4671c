"""Losses: the alive worker-seconds that left no token in the model, by cause.

All but the last are read from the histories. The last one is the remainder, so their sum explains all missing goodput.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diloco_common.observe.histories import Histories, Process
from diloco_deploy.chaos.goodput import Work, alive_times, death_of, steps_of, tokens_at, tokens_merged
from diloco_deploy.chaos.plan import LINK
from diloco_deploy.chaos.run import ChaosRun

LOSSES = {
    "joining": "joining: from asking to join to the beginning of the first inner step",
    "cut_short": "inner steps cut short by a kill",
    "died_unmerged": "trained, but not merged yet when its worker was killed",
    "died_shard_away": "the same, but the shard was down or cut off in the meantime",
    "never_merged": "trained by living workers, but not merged",
    "slower": "inner steps slower than without faults, and work in hand when the measured time began and ended",
}
"""Cause, as in the result -> its meaning."""


def losses(histories: Histories, run: ChaosRun, work: Work, baseline: dict[str, Any]) -> dict[str, float]:
    """Worker-seconds missing in goodput, by cause, at the fault-free pace. `baseline` comes from result.py."""
    pace, step_s = baseline["tokens_per_alive_s"], baseline["step_s"]
    lost = dict.fromkeys(LOSSES, 0.0)
    merged, fragments = tokens_merged(histories, run), histories.num_fragments
    away = _away(histories, run)
    trained = 0.0
    for process in histories.learner_processes():
        alive = list(alive_times(process, run))
        if not alive:
            continue
        lost["joining"] += _joining_s(process, alive, step_s)
        killed_at = death_of(process, run)
        killed = killed_at <= run.ended
        if killed and (steps := steps_of(process)):
            lost["cut_short"] += killed_at - max(run.began, steps[-1])
        low, high = tokens_at(process, run.began), tokens_at(process, run.ended)
        trained += high - low
        for fragment, shard in histories.owners.items():
            missing = high - low - merged.get((process.name, process.number, fragment), 0)
            since = _reached(process, high - missing)
            if not killed:
                cause = "never_merged"
            elif any(begin < killed_at and since < end for begin, end in away.get((shard, process.name), ())):
                cause = "died_shard_away"
            else:
                cause = "died_unmerged"
            lost[cause] += missing / fragments / pace
    lost["slower"] = work.alive_s - lost["joining"] - lost["cut_short"] - trained / pace
    return {name: round(seconds, 2) for name, seconds in lost.items()}


def _joining_s(process: Process, alive: list[tuple[float, float]], step_s: float) -> float:
    """Seconds for which the process was alive before its first inner step began."""
    first = next(iter(steps_of(process)), float("inf")) - step_s
    return sum(max(0.0, min(end, first) - begin) for begin, end in alive)


def _reached(process: Process, tokens: int) -> float:
    """When the learner had trained that many tokens, by its own count."""
    return next((float(line["t"]) for line in process.of("born", "stepped") if line["tokens"] >= tokens), process.began)


def _away(histories: Histories, run: ChaosRun) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Shard and worker -> times when the worker could not reach it: from a fault to the shard's next version."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for fault in run.faults:
        for shard, workers in _affected(histories, fault.target):
            end = _next_version(histories, shard, fault.ended, run)
            for worker in workers:
                found.setdefault((shard, worker), []).append((fault.began, end))
    return found


def _affected(histories: Histories, target: str) -> Iterator[tuple[str, list[str]]]:
    """The shards that a fault makes unreachable, each with the workers it affects."""
    if target in histories.shards:
        yield target, list(histories.learners)
    elif LINK in target:
        worker, shard = target.split(LINK)
        yield shard, [worker]


def _next_version(histories: Histories, shard: str, after: float, run: ChaosRun) -> float:
    times = (float(line["t"]) for process in histories.shards[shard] for line in process.of("announced"))
    return min((t for t in times if t >= after), default=run.ended)
