"""The report of a run: the JSON for `--report`, and a summary for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco_common import units
from diloco_common.settings import Settings
from diloco_deploy.cluster.model import Cluster
from diloco_deploy.run.folder import shown

Report = dict[str, Any]
_OF_TOTALS = (
    "unit", "tokens", "tokens_merged", "tokens_carried", "rounds", "late", "evictions", "bytes_pushed", "bytes_pulled",
)  # fmt: skip


def make_report(
    cluster: Cluster, settings: Settings, *, wall_s: float, evaluation: Mapping[str, Any] | None,
    interrupted: bool = False,
) -> Report:  # fmt: skip
    """The report of a run whose workers ended `wall_s` seconds after the command started.

    `evaluation`: the result of `diloco-worker evaluate` (losses in nats per byte); None if it did not run.
    """
    totals, found = cluster.totals(), evaluation or {}
    rates = {worker.name: float(worker.get("tokens_per_s", 0.0)) for worker in cluster.workers}
    return {
        "eval_loss_first": found.get("eval_loss_first"),
        "eval_loss_final": found.get("eval_loss_final"),
        "train_loss_final": totals.loss,
        **{key: getattr(totals, key) for key in _OF_TOTALS},
        "tokens_dropped": max(0, totals.tokens - totals.tokens_merged),
        "tokens_unmerged": {worker.name: int(worker.get("tokens_unmerged", 0)) for worker in cluster.workers},
        "wall_s": round(wall_s, 3),
        "versions": cluster.versions(),
        "participants_mean": round(totals.participants_mean, 4),
        "tokens_per_s": {**rates, "all": sum(rates.values())},
        "sync_stall_s": {worker.name: float(worker.get("sync_stall_s", 0.0)) for worker in cluster.workers},
        "restarts": {member.name: member.starts for member in cluster.members.values() if member.starts},
        "interrupted": interrupted,
        "seed": settings.run.seed,
        "evaluation": dict(found),
        "settings": settings.model_dump(mode="json"),
    }


def summary(report: Report, files: Mapping[str, Path | None], folder: Path | None = None) -> str:
    """The report in words: did it learn, what was lost, what did it cost, where are the results, what next.

    `folder`: of the run, to show how to continue; None: omit that.
    """
    trained, merged = (units.count(report[key]) for key in ("tokens", "tokens_merged"))
    if report["tokens"] < report["tokens_merged"]:  # only shards know what a killed worker had trained
        trained = f"at least {merged}"
    tokens = f"{trained} {report['unit']} trained, {merged} merged"
    moved = f"pushed {units.size(report['bytes_pushed'])}, pulled {units.size(report['bytes_pulled'])}"
    facts = [
        ("did it learn", _learned(report)),
        ("what was lost", _lost(report)),
        *(("", line) for line in _unusual(report)),
        ("what it cost", f"{units.clock(report['wall_s'])} since this start; {tokens} in all"),
        ("", f"{moved}; rounds {report['rounds']}, {report['participants_mean']:.2f} learners each"),
    ]
    facts += [(name, shown(path)) for name, path in files.items() if path is not None]
    if folder is not None:
        budget, done = int(report["settings"]["run"]["tokens"]), int(report["tokens_merged"])
        budget = 2 * (budget if done < 2 * budget else done)  # a resumed run can be far beyond its budget
        facts.append(
            ("what next", f"diloco resume {shown(folder)} --tokens {units.count(budget)} trains longer; docs/index.md")
        )
    wide = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{wide}}  {fact}".rstrip() for name, fact in facts)


def _learned(report: Report) -> str:
    first, final, train = report["eval_loss_first"], report["eval_loss_final"], report["train_loss_final"]
    if first is None or final is None:
        return f"training loss {units.loss(train)}; it was not evaluated"
    verdict = "yes" if final < first else "no"
    losses = f"held-out loss {units.loss(first)} -> {units.loss(final)} nats per byte"
    return f"{verdict}: {losses} (training {units.loss(train)})"


def _lost(report: Report) -> str:
    """What was lost: never accepted work, only what workers had trained after the last version."""
    rest = report["tokens_dropped"] - _dropped_on_the_way(report)  # together with merged tokens, all that was trained
    if report["tokens"] < report["tokens_merged"]:
        return "no merged work; restarted workers do not know how much they had trained before"
    if not rest:
        return "nothing"
    share = rest / report["tokens"] if report["tokens"] else 0.0
    last = f"the last {units.count(rest)} {report['unit']} ({share:.1%})"
    return f"nothing that was merged; {last} came after the last version"


def _dropped_on_the_way(report: Report) -> int:
    """Tokens that are in no version, and that no worker still held at the end. Below 1 %, it is noise between counts of
    several processes."""
    dropped = report["tokens_dropped"] - sum(report["tokens_unmerged"].values())
    return int(dropped) if dropped > 0.01 * report["tokens"] else 0


def _unusual(report: Report) -> Iterator[str]:
    """Facts that look like a loss but are not, and work dropped by workers that ended early."""
    if dropped := _dropped_on_the_way(report):
        yield (
            f"{units.count(dropped)} more {report['unit']} are in no version: a worker drops what it has not sent when "
            "it is interrupted or dies"
        )
    if report["late"]:
        yield f"{report['late']} contributions came after their round had closed; their work went into the next ones"
    if report["evictions"]:
        yield f"{report['evictions']} times a shard continued without a silent learner"
    if report["restarts"]:
        yield "started again: " + ", ".join(f"{name} {times} x" for name, times in sorted(report["restarts"].items()))
