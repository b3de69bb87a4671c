"""The report of a run: the JSON for `--report`, and a summary for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_common.settings import Settings
from diloco_deploy import units
from diloco_deploy.snapshot import Snapshot, worker_rate

Report = dict[str, Any]


def make_report(
    snapshot: Snapshot,
    settings: Settings,
    *,
    wall_s: float,
    evaluation: Mapping[str, Any] | None,
    interrupted: bool = False,
) -> Report:
    """All facts about a run whose workers have ended.

    Args:
        snapshot: the last answers of all members.
        wall_s: seconds from the start of the command until the last worker ended.
        evaluation: the result of `diloco-worker evaluate` (losses in nats per byte); None if it did not run.
        interrupted: whether the run ended before its budget was reached.
    """
    totals = snapshot.totals()
    found = evaluation or {}
    rates = {worker.name: worker_rate(worker) for worker in snapshot.workers}
    return {
        "eval_loss_first": found.get("eval_loss_first"),
        "eval_loss_final": found.get("eval_loss_final"),
        "train_loss_final": totals.loss,
        "tokens": totals.tokens,
        "tokens_merged": totals.tokens_merged,
        "tokens_carried": totals.tokens_carried,
        "wall_s": round(wall_s, 3),
        "versions": {str(fragment): version for fragment, version in snapshot.versions().items()},
        "rounds": totals.rounds,
        "participants_mean": round(totals.participants_mean, 4),
        "late": totals.late,
        "evictions": totals.evictions,
        "bytes_pushed": totals.bytes_pushed,
        "bytes_pulled": totals.bytes_pulled,
        "tokens_per_s": {**rates, "all": sum(rates.values())},
        "sync_stall_s": {worker.name: float(worker.get("sync_stall_s", 0.0)) for worker in snapshot.workers},
        "restarts": {member.name: len(member.past) for member in snapshot.members if member.past},
        "interrupted": interrupted,
        "seed": settings.run.seed,
        "evaluation": dict(found),
        "settings": settings.model_dump(mode="json"),
    }


def summary(report: Report, files: Mapping[str, Path | None]) -> str:
    """The report for people: one fact per line, with units, and the paths of the files."""
    facts: list[tuple[str, str]] = []
    first, final = report["eval_loss_first"], report["eval_loss_final"]
    if first is not None and final is not None:
        facts.append(("held-out loss", f"{units.loss(first)} -> {units.loss(final)} nats per byte"))
    facts += [
        ("training loss", units.loss(report["train_loss_final"])),
        ("tokens", f"{units.count(report['tokens'])} trained, {units.count(report['tokens_merged'])} merged"),
        ("time", f"{units.clock(report['wall_s'])} ({units.count(report['tokens_per_s']['all'])} tokens/s)"),
        ("pushed", units.size(report["bytes_pushed"])),
        ("pulled", units.size(report["bytes_pulled"])),
        ("rounds", f"{report['rounds']}, {report['participants_mean']:.2f} learners each"),
        ("late", f"{report['late']} contributions"),
        ("evictions", str(report["evictions"])),
    ]
    facts += [(name, str(path)) for name, path in files.items() if path is not None]
    wide = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{wide}}  {fact}" for name, fact in facts)
