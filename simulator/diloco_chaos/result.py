"""The result of `diloco_chaos`, as numbers for `--json` and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from diloco_chaos.goodput import LOSSES, ClusterWork, longest_gaps, losses, work_of
from diloco_chaos.plan import LINK, ChaosRun, Fault
from diloco_simulator.verify.histories import Histories
from diloco_simulator.verify.judge import BrokenPromise, stood_still, violations

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
"""Check, as in the result -> what it counts, in words."""
_SHOWN_MAX = 20


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
        "progress": round(work.progress, 4),
        "longest_step_gap_s": _longest(gaps),
        **{check: counts[check] for check in CHECKS},
        "seed": seed,
        "seconds": round(work.seconds, 2),
        "dead_share": round(work.dead_share, 4),
        "healed_s": run.healed_s,
        "faults_by_kind": dict(
            Counter(f"{f.kind.value} {'link' if LINK in f.target else f.target.partition('-')[0]}" for f in plan)
        ),
        "versions": sum(1 for process in histories.shard_processes() for _ in process.of("announced")),
        "contributions": sum(merge.push is not None for merge in histories.merges()),
        "evictions": sum(
            line["code"] != "LEFT" for process in histories.shard_processes() for line in process.of("gone")
        ),
        "tokens": round(work.tokens),
        "tokens_accepted": round(work.tokens_accepted),
        "tokens_per_alive_s": round(work.per_alive_s, 2),
        "step_s": round(work.step_s, 4),
        "lost_s": losses(histories, run, work, baseline) if baseline else None,
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
        f"progress     {result['progress']:.1%} of the seconds brought a new version",
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
        *(f"  {one['check']}: {one['what']}" for one in result["found"][:_SHOWN_MAX]),
    ]
    more = len(result["found"]) - _SHOWN_MAX
    if more > 0:
        lines.append(f"  ... and {more} more, in the JSON")
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
    """Goodput, and where the rest of the work went."""
    if result["baseline"] is None:
        return []
    per_alive, alive_s = result["goodput_per_alive"], result["alive_s"]
    return [
        f"goodput      {per_alive:.1%} of fault-free tokens per alive worker-second, "
        f"{result['goodput_absolute']:.1%} absolute (at most {1 - result['dead_share']:.1%})",
        f"the rest     {alive_s * (1 - per_alive):.1f} of {alive_s:.0f} alive worker-seconds:",
        *(
            f"  {seconds:8.1f} s  {seconds / alive_s:5.1%}  {LOSSES[cause]}"
            for cause, seconds in result["lost_s"].items()
        ),
    ]


def _longest(gaps: Sequence[tuple[float, str]]) -> float:
    return round(gaps[0][0], 3) if gaps else 0.0


def _ratio(value: float, of: float) -> float:
    return round(value / of, 4) if of else 0.0
