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
from diloco_deploy.run.members import Watch
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


def test_people_read_samples_where_workers_count_them() -> None:
    found = Snapshot(of(*shards(1), *workers(2, unit="samples")))
    report = summary(make_report(found.cluster, Settings(), wall_s=1.0, evaluation=None), {})
    for text in (" ".join(drawn(view(found, 100), 100)), line(found, 200), report):
        assert " samples" in text
        assert "tok" not in text
    assert "samples/s" in line(found, 200)


def said(uptime_s: float, *events: tuple[str, str, float]) -> dict[str, Any]:
    """Events: what, who, and how long ago."""
    codes = {"evicted": "LEASE_EXPIRED"}
    told = [{"ago_s": ago_s, "event": what, "learner": who, "code": codes.get(what)} for what, who, ago_s in events]
    return shard(0, uptime_s=uptime_s, events=told)


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(
            [
                (10.0, said(10.0, ("evicted", "ann", 0.2)), ["shard-0: ann evicted (LEASE_EXPIRED)"]),
                (10.5, said(10.5, ("evicted", "ann", 0.8)), []),
                (30.0, said(30.0, ("evicted", "ann", 20.3), ("evicted", "ann", 0.1), ("evicted", "bob", 0.1)),
                 ["shard-0: ann evicted (LEASE_EXPIRED)", "shard-0: bob evicted (LEASE_EXPIRED)"]),
            ],
            id="an event is told once, however often it is polled",
        ),
        pytest.param(
            [
                (10.0, said(5.0, ("joined", "ann", 0.0)), ["shard-0: ann joined"]),
                (14.0, said(6.0, ("joined", "ann", 1.0)), []),
                (15.0, None, []),
                (20.0, said(5.0, ("joined", "ann", 0.0)), ["shard-0: ann joined"]),
            ],
            id="an answer that comes late tells nothing again, and the next process tells anew",
        ),
    ],
)  # fmt: skip
def test_what_a_shard_tells_is_said_once(answers: list[tuple[float, Any, list[str]]]) -> None:
    watch = Watch(0.0)
    watch.expect("shard-0", "shard")
    for now, status, lines in answers:
        if status is None:
            watch.expect("shard-0", "shard")
        else:
            assert watch.heard("shard-0", status, now) == lines


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
