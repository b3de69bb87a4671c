"""How much work got through, from the histories and the faults of a run; and the result as numbers and in words.

alive      from a worker's request to join until its kill, without the time during which it is frozen
tokens     of merged contributions, per fragment of the model; a contribution that is accepted twice (fenced off, then
           sent again) counts once
goodput    tokens per alive worker-second, or per second, divided by the same figure of a fault-free run as long
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from diloco_chaos.faults import ChaosRun, Fault
from diloco_simulator.verify.histories import Histories, Process
from diloco_simulator.verify.judge import BrokenPromise, stood_still, violations


@dataclass(frozen=True)
class ClusterWork:
    """The work of a cluster in its measured time."""

    seconds: float
    alive_s: float
    """Summed over the workers."""
    workers: int
    tokens: float
    """Trained in that time, and merged by the end of the run. Mean over the fragments."""
    step_s: float
    """Median time of an inner step. If it is shorter than in a fault-free run, dead workers left more CPU to others."""

    @property
    def per_alive_s(self) -> float:
        return self.tokens / self.alive_s if self.alive_s else 0.0

    @property
    def dead_share(self) -> float:
        """Share of all worker-seconds in which the worker was dead, starting or frozen."""
        return 1.0 - self.alive_s / (self.seconds * self.workers)


def work_of(histories: Histories, run: ChaosRun) -> ClusterWork:
    fragments = max(1, histories.num_fragments)
    merged = tokens_merged(histories, run).total()
    alive_s = sum(end - begin for process in histories.learner_processes() for begin, end in alive_times(process, run))
    times = [after - before for one in histories.learner_processes() for before, after in pairwise(steps_of(one))]
    return ClusterWork(
        run.ended - run.began, alive_s, len(histories.learners), merged / fragments,
        median(times) if times else 0.0,
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
    """The learner's own count of tokens at time `t`; before its first step, its initial count."""
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
    """For each learner process, the longest time without an inner step, in seconds, and its name. The longest is first.

    Time counts from the process's first step on, while it was alive and not frozen.
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
    """The start and end of each time that the process was frozen, in order."""
    faults = [fault for fault in run.faults if fault.kind == "freeze" and fault.target == process.name]
    return sorted((fault.began, fault.ended) for fault in faults if fault.ended > process.began)


def steps_of(process: Process) -> list[float]:
    """When the inner steps of the process ended."""
    return [float(line["t"]) for line in process.of("stepped")]


Result = dict[str, Any]
CHECKS = {
    "double_counted": "contributions counted twice",
    "work_lost": "contributions lost",
    "lost_versions": "announced versions lost",
    "differing_bytes": "versions whose bytes differ",
    "fencing": "contributions of generations that were over",
    "accounting": "contributions unaccounted for",
    "stood_still": "living workers that stood still",
    "unplanned": "processes that ended or made no progress",
}
"""Name of a check in the result -> what the check counts."""


def make_baseline(histories: Histories, run: ChaosRun) -> Result:
    """The result of a fault-free run. Goodput is relative to it."""
    work = work_of(histories, run)
    return {
        "seconds": round(work.seconds, 2),
        "tokens": round(work.tokens),
        "tokens_per_alive_s": round(work.per_alive_s, 2),
        "step_s": round(work.step_s, 4),
        "longest_step_gap_s": _longest(longest_gaps(histories, run)),
    }


def make_result(
    histories: Histories,
    run: ChaosRun,
    plan: Sequence[Fault],
    baseline: Result | None,
    *,
    seed: int,
    gap_max_s: float,
) -> Result:
    """The whole result, to print and to write. `violations` must be 0. Without a `baseline` there is no goodput."""
    work, gaps = work_of(histories, run), longest_gaps(histories, run)
    found = [
        *violations(histories),
        *stood_still(gaps, gap_max_s),
        *(BrokenPromise("unplanned", said) for said in run.exits),
    ]
    counts = Counter[str]()
    for violation in found:
        counts[violation.check] += violation.count
    return {
        "violations": len(found),
        "faults": len(plan),
        **_goodput(work, baseline),
        "longest_step_gap_s": _longest(gaps),
        **{check: counts[check] for check in CHECKS},
        "seed": seed,
        "seconds": round(work.seconds, 2),
        "dead_share": round(work.dead_share, 4),
        "healed_s": run.healed_s,
        "faults_by_kind": dict(Counter(f"{f.kind.value} {f.target.partition('-')[0]}" for f in plan)),
        "versions": sum(1 for process in histories.shard_processes() for _ in process.of("announced")),
        "contributions": sum(merge.push is not None for merge in histories.merges()),
        "evictions": sum(
            line["code"] != "LEFT" for process in histories.shard_processes() for line in process.of("gone")
        ),
        "tokens": round(work.tokens),
        "tokens_per_alive_s": round(work.per_alive_s, 2),
        "step_s": round(work.step_s, 4),
        "alive_s": round(work.alive_s, 2),
        "baseline": baseline,
        "plan": [{"at_s": f.at_s, "harm": f.kind.value, "target": f.target, "for_s": f.for_s} for f in plan],
        "found": [{"check": v.check, "what": v.what} for v in found],
    }


def summary(result: Result) -> str:
    baseline = result["baseline"]
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(result["faults_by_kind"].items()))
    lines = [
        f"{result['faults']} faults in {result['seconds']:.0f} s, seed {result['seed']}: {kinds}",
        f"workers dead, starting or frozen {result['dead_share']:.1%} of the time, {result['evictions']} evictions",
        f"{result['versions']} versions announced, {result['contributions']} contributions merged",
        "",
        *(f"  {result[check]:6}  {words}" for check, words in CHECKS.items()),
        "",
        *_compared(result),
        f"steps        {1000 * result['step_s']:.0f} ms in the median"
        + (f", {1000 * baseline['step_s']:.0f} ms without faults" if baseline else ""),
        f"longest gap  {result['longest_step_gap_s']:.2f} s between two inner steps of a living worker"
        + (f", {baseline['longest_step_gap_s']:.2f} s without faults" if baseline else ""),
        "healing      "
        + (
            "not complete: some processes made no progress after the last fault"
            if result["healed_s"] is None
            else f"every process made progress within {result['healed_s']:.1f} s after the last fault"
        ),
        "",
        *(f"  {one['check']}: {one['what']}" for one in result["found"]),
    ]
    lines.append(f"{result['violations']} violations" if result["violations"] else "no violations")
    return "\n".join(lines)


def _goodput(work: ClusterWork, baseline: Result | None) -> Result:
    if baseline is None:
        return {"goodput_per_alive": None, "goodput_absolute": None}
    return {
        "goodput_per_alive": _ratio(work.per_alive_s, baseline["tokens_per_alive_s"]),
        "goodput_absolute": _ratio(work.tokens / work.seconds, baseline["tokens"] / baseline["seconds"]),
    }


def _compared(result: Result) -> list[str]:
    if result["baseline"] is None:
        return []
    return [
        f"goodput      {result['goodput_per_alive']:.1%} of fault-free tokens per alive worker-second, "
        f"{result['goodput_absolute']:.1%} absolute (at most {1 - result['dead_share']:.1%})"
    ]


def _longest(gaps: Sequence[tuple[float, str]]) -> float:
    return round(gaps[0][0], 3) if gaps else 0.0


def _ratio(value: float, of: float) -> float:
    return round(value / of, 4) if of else 0.0
