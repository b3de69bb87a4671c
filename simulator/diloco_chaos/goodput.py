"""How much work got through, from the histories and the faults of a run.

alive      from a worker's request to join until its kill, without the time during which it is frozen
tokens     of merged contributions, per fragment of the model; one that is accepted twice (fenced off, then sent again)
           counts once
goodput    tokens per alive worker-second, or per second, divided by the same of a fault-free run of equal length
progress   share of the seconds in which a version of the model was announced, so the job as a whole moved on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from diloco_chaos.plan import LINK, ChaosRun
from diloco_simulator.verify.histories import Histories, Process


@dataclass(frozen=True)
class ClusterWork:
    """The work of a cluster in its measured time."""

    seconds: float
    alive_s: float
    """Summed over the workers."""
    workers: int
    tokens: float
    """Trained in that time, and merged by the end of the run. Mean over the fragments."""
    tokens_accepted: float
    """Accepted by the shards in that time, mean over the fragments. A contribution that was sent again counts again."""
    step_s: float
    """Median time of an inner step. If it is below that of a fault-free run, dead workers left the others more CPU."""
    progress: float
    """Share of the seconds in which a version was announced."""

    @property
    def per_alive_s(self) -> float:
        return self.tokens / self.alive_s if self.alive_s else 0.0

    @property
    def dead_share(self) -> float:
        """Share of all worker-seconds in which the worker was dead, starting or frozen."""
        return 1.0 - self.alive_s / (self.seconds * self.workers)


def work_of(histories: Histories, run: ChaosRun) -> ClusterWork:
    fragments = max(1, histories.num_fragments)
    accepted = sum(
        line["tokens"]
        for process in histories.shard_processes()
        for line in process.of("accepted")
        if run.began <= line["t"] <= run.ended
        and line["learner"] in histories.learners
        and line["fragment"] not in histories.companions
    )
    merged = tokens_merged(histories, run).total()
    alive_s = sum(end - begin for process in histories.learner_processes() for begin, end in alive_times(process, run))
    times = [after - before for one in histories.learner_processes() for before, after in pairwise(steps_of(one))]
    return ClusterWork(
        run.ended - run.began, alive_s, len(histories.learners), merged / fragments, accepted / fragments,
        median(times) if times else 0.0, _progress(histories, run),
    )  # fmt: skip


def tokens_merged(histories: Histories, run: ChaosRun) -> Counter[tuple[str, int, int]]:
    """Worker, number of its process, fragment of the model -> merged tokens that it trained in the measured time."""
    trained = {
        (process.name, process.number): (tokens_at(process, run.began), tokens_at(process, run.ended))
        for process in histories.learner_processes()
    }
    merged = Counter[tuple[str, int, int]]()
    for merge in histories.merges():
        if (push := merge.push) is not None and merge.fragment not in histories.companions:
            name = push.process.name, push.process.number
            low, high = trained[name]
            merged[*name, merge.fragment] += max(0, min(push.end, high) - max(push.since, low))
    return merged


def tokens_at(process: Process, t: float) -> int:
    """The learner's own count of tokens at a time; before its first step, its initial count."""
    counts = [int(line["tokens"]) for line in process.of("born", "stepped") if line["t"] <= t]
    return counts[-1] if counts else int(process.lines[0]["tokens"])


def alive_times(process: Process, run: ChaosRun) -> Iterator[tuple[float, float]]:
    """The parts of the measured time in which this process was alive and not frozen."""
    begin, end = max(process.began, run.began), min(death_of(process, run), run.ended)
    for frozen_from, frozen_to in frozen_times(process, run):
        if begin < min(frozen_from, end):
            yield begin, min(frozen_from, end)
        begin = max(begin, frozen_to)
    if begin < end:
        yield begin, end


def longest_gaps(histories: Histories, run: ChaosRun) -> list[tuple[float, str]]:
    """For each learner process, the longest time without an inner step, in seconds, and its name; longest first.

    Counts from its first step on, while it was alive and not frozen.
    """
    gaps = []
    for process in histories.learner_processes():
        steps = steps_of(process)
        if not steps:
            continue
        gone = min(death_of(process, run), max(run.ended, steps[-1]))
        frozen = list(frozen_times(process, run))
        marks = [*steps, max(gone, steps[-1])]
        longest = max(
            end - begin - sum(max(0.0, min(end, b) - max(begin, a)) for a, b in frozen)
            for begin, end in pairwise(marks)
        )
        gaps.append((longest, process.name))
    return sorted(gaps, reverse=True)


def death_of(process: Process, run: ChaosRun) -> float:
    """When the process was killed; infinity if it was not."""
    kills = [fault.began for fault in run.faults if fault.kind == "kill" and fault.target == process.name]
    return min((at for at in kills if at >= process.began), default=float("inf"))


def frozen_times(process: Process, run: ChaosRun) -> list[tuple[float, float]]:
    """From when to when the process was frozen, in order."""
    faults = [fault for fault in run.faults if fault.kind == "freeze" and fault.target == process.name]
    return sorted((fault.began, fault.ended) for fault in faults if fault.ended > process.began)


def steps_of(process: Process) -> list[float]:
    """When the inner steps of the process ended."""
    return [float(line["t"]) for line in process.of("stepped")]


def _progress(histories: Histories, run: ChaosRun) -> float:
    seconds = max(1, int(run.ended - run.began))
    times = (
        line["t"] - run.began
        for process in histories.shard_processes()
        for line in process.of("announced")
        if line["fragment"] not in histories.companions
    )
    return len({int(t) for t in times if 0.0 <= t < seconds}) / seconds


LOSSES = {
    "joining": "joining: from asking to join to the beginning of the first inner step",
    "cut_short": "inner steps cut short by a kill",
    "died_unmerged": "trained, but not merged yet when its worker was killed",
    "died_shard_away": "the same, but the shard was down or cut off in the meantime",
    "never_merged": "trained by living workers, but not merged",
    "slower": "inner steps slower than without faults, and work in hand when the measured time began and ended",
}
"""Cause, as in the result -> its meaning: where alive worker-seconds went that left no token in the model. All but the
last are read from the histories; the last is the rest, so that their sum explains all missing goodput."""


def losses(histories: Histories, run: ChaosRun, work: ClusterWork, baseline: dict[str, Any]) -> dict[str, float]:
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
        worker, _, shard = fault.target.rpartition(LINK)
        if shard not in histories.shards:  # a worker's
            continue
        times = (float(line["t"]) for process in histories.shards[shard] for line in process.of("announced"))
        end = min((t for t in times if t >= fault.ended), default=run.ended)
        for name in [worker] if worker else histories.learners:
            found.setdefault((shard, name), []).append((fault.began, end))
    return found
