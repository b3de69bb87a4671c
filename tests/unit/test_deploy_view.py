"""What people see of a cluster on a terminal: tables, lines, events, the report at the end. Pure, no process."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from diloco_common.settings import Settings
from diloco_deploy.cluster.members import SeenMember
from diloco_deploy.cluster.model import Cluster
from diloco_deploy.report import make_report, summary
from diloco_deploy.terminal import Snapshot, line, view
from statuses import learner, shard, worker


def shards(count: int, **changed: Any) -> list[SeenMember]:
    numbers = {"tokens_merged": 500_000, "tokens_budget": 2_000_000, "rounds": 10, "bytes_pushed": 1_500_000,
               "bytes_pulled": 3_000_000, "evictions": 1}  # fmt: skip
    known = [learner("worker-0"), learner("worker-1", "evicted")]
    return [
        SeenMember(
            f"shard-{i}",
            "shard",
            "up",
            shard(i, *known, **numbers | {"fragments": [{"id": i, "version": 3 + i}]} | changed),
        )
        for i in range(count)
    ]


def workers(count: int, **changed: Any) -> list[SeenMember]:
    own = [{"loss": 2.0 + i, "tokens_unmerged": 60_000 - 20_000 * i} | changed for i in range(count)]
    return [SeenMember(f"worker-{i}", "worker", "up", worker(f"worker-{i}", **own[i])) for i in range(count)]


def of(*members: SeenMember) -> Cluster:
    return Cluster({member.name: member for member in members})


def cluster(*, elapsed_s: float = 83.0, eta_s: float | None = 249.0) -> Snapshot:
    return Snapshot(of(*shards(2), *workers(2)), elapsed_s, elapsed_s, (5.5, 4.0, 3.0, 2.5), eta_s)


def drawn(what: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 120])
def test_everything_fits_the_terminal(width: int) -> None:
    for lines in (drawn(view(cluster(), width), width), [line(cluster(), width)]):
        assert all(len(one) <= width for one in lines)
    text = "\n".join(drawn(view(cluster(), width), width))
    for said in ("shard-1", "worker-1", "training", "away", "2.000", "3-3", "25%", "4:09 left"):
        assert said in text, said
    assert "…" not in text, "nothing is cut"
    assert any(set(one.strip()) <= set("━╸╺") and one.strip() for one in text.splitlines()), "a bar on its own line"


def test_the_report_holds_what_is_promised_and_its_summary_has_units() -> None:
    evaluation = {"eval_loss_first": 5.545, "eval_loss_final": 2.31}
    report = make_report(cluster().cluster, Settings(), wall_s=83.4, evaluation=evaluation)
    promised = (
        "eval_loss_first eval_loss_final train_loss_final tokens wall_s versions rounds participants_mean late "
        "tokens_merged tokens_carried evictions bytes_pushed bytes_pulled tokens_per_s sync_stall_s seed settings"
    )
    assert set(promised.split()) <= set(report)
    assert report["versions"] == {"0": 3, "1": 4}
    assert report["sync_stall_s"] == {"worker-0": 0.5, "worker-1": 0.5}
    text = summary(report, {"model": None})
    for said in (
        "yes: held-out loss 5.545 -> 2.310 nats per byte",
        "the last 100k tokens (16.7%) came after the last version\n",
        "2 contributions came after their round had closed; their work went into the next ones",
        "1:23 since this start; 600k tokens trained",
        "3.00 MB",
        "20, 2.00 learners each",
    ):
        assert said in text
    assert "model" not in text
