"""From the /status of processes to what people see: sums, tables, lines, the report. Pure, no process."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from diloco_common.settings import Settings
from diloco_deploy import units
from diloco_deploy.cluster.learners import put_together
from diloco_deploy.cluster.members import Member
from diloco_deploy.cluster.model import Cluster
from diloco_deploy.cluster.roll_call import roll_call
from diloco_deploy.run.members import Watch
from diloco_deploy.show.report import make_report, summary
from diloco_deploy.show.status import ClusterStatus
from diloco_deploy.show.terminal import LineDisplay, Snapshot, line, tables, view


def shard(index: int, **changed: Any) -> dict[str, Any]:
    return {
        "role": "shard",
        "name": f"shard-{index}",
        "index": index,
        "ready": True,
        "tokens_merged": 500_000,
        "tokens_budget": 2_000_000,
        "done": False,
        "learners": [
            {"id": "worker-0", "state": "alive"},
            {"id": "worker-1", "state": "evicted"},
            {"id": "worker-2", "state": "alive", "quarantine": {"left_s": 30.0, "why": "NOT_FINITE", "times": 1}},
        ],
        "fragments": [{"id": index, "version": 3 + index, "round_open": True}],
        "rounds": 10,
        "participants_mean": 2.0,
        "late": 1,
        "evictions": 1,
        "events": [],
        "bytes_pushed": 1_500_000,
        "bytes_pulled": 3_000_000,
    } | changed


def worker(index: int, **changed: Any) -> dict[str, Any]:
    return {
        "role": "worker",
        "name": f"worker-{index}",
        "state": "training",
        "inner_step": 100,
        "tokens": 300_000,
        "loss": 2.0 + index,
        "tokens_per_s": 1000.0,
        "sync_stall_s": 0.5,
        "contributions": {"merged": 4, "late": 1},
        "tokens_carried": 10,
        "tokens_unmerged": 60_000 - 20_000 * index,
    } | changed


def of(*members: Member) -> Cluster:
    return Cluster({member.name: member for member in members})


def cluster(*, elapsed_s: float = 83.0, eta_s: float | None = 249.0) -> Snapshot:
    members = [Member(f"shard-{i}", "shard", "up", shard(i)) for i in range(2)]
    members += [Member(f"worker-{i}", "worker", "up", worker(i)) for i in range(2)]
    return Snapshot(of(*members), elapsed_s, elapsed_s, (5.5, 4.0, 3.0, 2.5), eta_s)


def drawn(what: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_sums_are_taken_over_shards_and_workers() -> None:
    totals = cluster().cluster.totals()
    assert (totals.tokens, totals.tokens_merged, totals.tokens_budget) == (600_000, 500_000, 2_000_000)
    assert (totals.loss, totals.tokens_per_s, totals.tokens_carried) == (2.5, 2000.0, 20)
    assert (totals.rounds, totals.participants_mean, totals.late, totals.evictions) == (20, 2.0, 2, 2)
    assert (totals.bytes_pushed, totals.bytes_pulled, totals.done) == (3_000_000, 6_000_000, False)


def test_the_versions_of_a_shard_are_those_of_the_model() -> None:
    fragments = [{"id": 0, "version": 40}, {"id": 1, "version": 10, "companion": True}]
    found = Snapshot(of(Member("shard-0", "shard", "up", shard(0, fragments=fragments))))
    assert "40-40" in " ".join(drawn(tables(found, 100), 100))


def test_people_read_samples_where_workers_count_them() -> None:
    members = [Member("shard-0", "shard", "up", shard(0))]
    members += [Member(f"worker-{i}", "worker", "up", worker(i, unit="samples")) for i in range(2)]
    found = Snapshot(of(*members))
    said = summary(make_report(found.cluster, Settings(), wall_s=1.0, evaluation=None), {})
    for text in (" ".join(drawn(view(found, 100), 100)), line(found, 200), said):
        assert " samples" in text
        assert "tok" not in text
    assert "samples/s" in line(found, 200)


def test_a_shard_with_more_fragments_weighs_more_in_the_progress() -> None:
    three = shard(0, tokens_merged=400, fragments=[{"id": i, "version": 1} for i in range(3)])
    one = shard(1, tokens_merged=800, fragments=[{"id": 3, "version": 1}])
    assert of(Member("shard-0", "shard", "up", three), Member("shard-1", "shard", "up", one)).tokens_merged == 500


def test_progress_does_not_move_while_a_shard_starts_again() -> None:
    watch = Watch(0.0)
    for index, merged in enumerate((400, 800)):
        watch.expect(f"shard-{index}", "shard")
        watch.heard(f"shard-{index}", shard(index, tokens_merged=merged), 1.0)
    watch.expect("shard-1", "shard")
    assert watch.cluster.totals().tokens_merged == 600, "it has not answered yet"
    watch.heard("shard-1", shard(1, tokens_merged=0, fragments=[], tokens_budget=2_000_000), 3.0)
    assert watch.cluster.totals().tokens_merged == 600, "it reads its versions"
    watch.heard("shard-1", shard(1, tokens_merged=802), 4.0)
    assert watch.cluster.totals().tokens_merged == 601


def test_the_budget_is_known_while_the_only_shard_starts_again() -> None:
    watch = Watch(0.0)
    watch.expect("shard-0", "shard")
    watch.heard("shard-0", shard(0), 1.0)
    watch.expect("shard-0", "shard")
    assert watch.cluster.totals().tokens_budget == 2_000_000


def test_counters_survive_the_end_of_a_life() -> None:
    watch = Watch(0.0)
    watch.expect("worker-0", "worker")
    watch.expect("shard-0", "shard")
    watch.heard("worker-0", worker(0, tokens=500, tokens_carried=10), 1.0)
    watch.heard("shard-0", shard(0, rounds=10, participants_mean=2.0, bytes_pushed=100), 1.0)
    for name in ("worker-0", "shard-0"):
        watch.expect(name, "worker" if name == "worker-0" else "shard")
    assert watch.cluster.totals().tokens == 500, "what a dead worker did still counts"
    watch.heard("worker-0", worker(0, tokens=700, tokens_carried=5), 3.0)
    watch.heard("shard-0", shard(0, rounds=30, participants_mean=4.0, bytes_pushed=50), 3.0)
    totals = watch.cluster.totals()
    assert totals.tokens == 700, "a worker goes on counting from its checkpoint"
    assert (totals.tokens_carried, totals.rounds, totals.bytes_pushed) == (15, 40, 150)
    assert totals.participants_mean == 3.5


@pytest.mark.parametrize(
    ("at_0", "at_1", "word"),
    [
        ("alive", "alive", "training"),
        ("alive", "evicted", "partly"),
        ("evicted", "alive", "partly"),
        ("left", "alive", "partly"),
        ("alive", "left", "partly"),
        ("stalled", "alive", "stalled"),
        ("left", "evicted", "away"),
        ("left", "left", "left"),
    ],
)
def test_status_and_page_say_the_same_of_a_learner(at_0: str, at_1: str, word: str) -> None:
    answers = {
        f"shard-{index}": shard(index, count=2, learners=[{"id": "ann", "state": state}])
        for index, state in enumerate((at_0, at_1))
    }
    roll = roll_call(dict.fromkeys(answers, "host:1"), answers, None, 0.0)
    (shown,) = [member.state for member in ClusterStatus.of(roll).members if member.name == "ann"]
    shards = [Member(name, "shard", "up", answer) for name, answer in answers.items()]
    assert (shown, put_together(shards, {})["ann"].state) == (word, word)


@pytest.mark.parametrize("step_time_s", [5e-324, 0.0, 1e-7])
def test_a_step_that_takes_no_time_has_no_rate(step_time_s: float) -> None:
    said = {"id": "ann", "state": "alive", "inner_step": 10, "tokens": 1000, "step_time_s": step_time_s}
    answers = {"shard-0": shard(0, count=1, learners=[said])}
    (ann,) = [one for one in roll_call({"shard-0": "host:1"}, answers, None, 0.0).present if one.name == "ann"]
    assert ann.status is not None
    assert ann.status["tokens_per_s"] == 0.0
    assert put_together([Member("shard-0", "shard", "up", answers["shard-0"])], {})["ann"].tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("member", "state"),
    [
        (Member("worker-0", "worker", "starting"), "starting"),
        (Member("worker-0", "worker", "up"), "starting"),
        (Member("worker-0", "worker", "up", worker(0)), "training"),
        (Member("worker-1", "worker", "up", worker(1)), "away"),
        (Member("worker-2", "worker", "up", worker(2)), "quarantined"),
        (Member("worker-0", "worker", "up", worker(0), heard_at=0.0), "silent 7s"),
        (Member("worker-0", "worker", "died", worker(0)), "died"),
        (Member("shard-0", "shard", "up", shard(0, ready=False)), "not ready"),
        (Member("shard-0", "shard", "up", shard(0, done=True)), "done"),
    ],
)
def test_a_member_is_described_by_the_worst_that_is_known(member: Member, state: str) -> None:
    assert of(Member("shard-9", "shard", "up", shard(9)), member).state_of(member, 7.0) == state


def test_an_event_is_told_once_however_often_it_is_polled() -> None:
    def says(*events: tuple[float, str]) -> dict[str, Any]:
        return shard(
            0,
            events=[
                {"ago_s": ago, "event": "evicted", "learner": name, "code": "LEASE_EXPIRED"} for ago, name in events
            ],
        )

    watch = Watch(0.0)
    watch.expect("shard-0", "shard")
    assert watch.heard("shard-0", says((0.2, "worker-1")), 10.0) == ["shard-0: worker-1 evicted (LEASE_EXPIRED)"]
    assert watch.heard("shard-0", says((0.8, "worker-1")), 10.5) == []
    again = says((20.3, "worker-1"), (0.1, "worker-1"), (0.1, "worker-2"))
    assert watch.heard("shard-0", again, 30.0) == [
        "shard-0: worker-1 evicted (LEASE_EXPIRED)",
        "shard-0: worker-2 evicted (LEASE_EXPIRED)",
    ]


def test_a_disk_that_takes_no_versions_is_told_once_and_so_is_its_end() -> None:
    full = shard(0, ready=False, reason="storage: [Errno 28] No space left on device")
    watch = Watch(0.0)
    watch.expect("shard-0", "shard")
    assert watch.heard("shard-0", shard(0, reason="serving"), 1.0) == []
    assert watch.heard("shard-0", full, 2.0) == [
        "shard-0: the disk takes no versions, and the run waits for it: [Errno 28] No space left on device (STORAGE)"
    ]
    assert watch.heard("shard-0", full, 3.0) == []
    assert watch.heard("shard-0", shard(0, reason="serving"), 4.0) == ["shard-0: the disk takes versions again"]


def test_an_answer_that_comes_late_tells_nothing_again_and_the_next_process_tells_anew() -> None:
    def says(uptime_s: float, ago_s: float) -> dict[str, Any]:
        return shard(0, uptime_s=uptime_s, events=[{"ago_s": ago_s, "event": "joined", "learner": "worker-1"}])

    watch = Watch(0.0)
    watch.expect("shard-0", "shard")
    assert watch.heard("shard-0", says(5.0, 0.0), 10.0) == ["shard-0: worker-1 joined"]
    assert watch.heard("shard-0", says(6.0, 1.0), 14.0) == [], "it was said at 11"
    watch.expect("shard-0", "shard")
    assert watch.heard("shard-0", says(5.0, 0.0), 20.0) == ["shard-0: worker-1 joined"]


def test_the_time_left_follows_the_pace_of_merging() -> None:
    watch = Watch(0.0)
    watch.expect("shard-0", "shard")
    watch.heard("shard-0", shard(0, tokens_merged=0, tokens_budget=1000), 0.0)
    assert watch.snapshot(0.0).eta_s is None, "one point has no pace"
    watch.heard("shard-0", shard(0, tokens_merged=50, tokens_budget=1000), 1.0)
    assert watch.snapshot(1.0).eta_s is None, "a moment has none either"
    watch.heard("shard-0", shard(0, tokens_merged=250, tokens_budget=1000), 5.0)
    assert watch.snapshot(5.0).eta_s == pytest.approx(15.0)


def test_the_time_before_the_first_version_is_no_pace() -> None:
    watch = Watch(0.0)
    watch.expect("shard-0", "shard")
    for now in range(101):
        watch.heard("shard-0", shard(0, tokens_merged=0, tokens_budget=1000), float(now))
    watch.heard("shard-0", shard(0, tokens_merged=500, tokens_budget=1000), 105.0)
    assert watch.snapshot(105.0).eta_s == pytest.approx(5.0)


def test_the_course_of_the_loss_is_bounded() -> None:
    watch = Watch(0.0)
    watch.expect("worker-0", "worker")
    for step in range(2000):
        watch.heard("worker-0", worker(0, loss=2000.0 - step), 0.0)
        watch.sample_loss()
    losses = watch.snapshot(0.0).losses
    assert 100 < len(losses) <= 512
    assert list(losses) == sorted(losses, reverse=True)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_everything_fits_the_terminal(width: int) -> None:
    for lines in (drawn(view(cluster(), width), width), [line(cluster(), width)]):
        assert all(len(one) <= width for one in lines)
    text = "\n".join(drawn(view(cluster(), width), width))
    for said in ("shard-1", "worker-1", "training", "away", "2.000", "3-3", "25%", "4:09 left"):
        assert said in text, said
    assert "…" not in text, "nothing is cut"
    assert any(set(one.strip()) <= set("━╸╺") and one.strip() for one in text.splitlines()), "a bar on its own line"


def test_a_cluster_of_which_nothing_is_known_can_be_shown() -> None:
    unknown = Snapshot(of(Member("shard-0", "shard"), Member("worker-0", "worker")), doing="starting shards")
    assert "starting shards" in "\n".join(drawn(view(unknown, 80), 80))
    assert "starting shards" in line(unknown, 80)


def test_a_wide_table_tells_more() -> None:
    narrow, wide = (" ".join(drawn(tables(cluster(), width), width)) for width in (40, 100))
    for title in ("step", "merged", "carried", "learners", "open"):
        assert title in wide
        assert title not in narrow


def test_a_line_says_how_far_how_fast_and_how_much() -> None:
    assert line(cluster(), 200) == (
        "1:23  loss 2.500  merged 500k 25%  4:09 left  2.00k tok/s  workers 2/2  rounds 20  "
        "pushed 3.00 MB  pulled 6.00 MB"
    )


def test_a_line_says_when_the_model_is_evaluated_and_how_far() -> None:
    evaluating = dataclasses.replace(cluster(), doing="evaluating the model, 40%")
    assert line(evaluating, 200).startswith("1:23  evaluating the model, 40%  merged 500k")


def test_plain_lines_come_at_their_pace() -> None:
    out = io.StringIO()
    display = LineDisplay(Console(file=out), every_s=5.0)
    for now in (10.0, 11.0, 14.9, 15.0):
        display.show(cluster(elapsed_s=now), now)
    display.tell("worker-1 died (signal 9)")
    assert [one.split("  ")[0] for one in out.getvalue().splitlines()] == [
        "0:10",
        "0:15",
        "worker-1 died (signal 9)",
    ]


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
        "the last 100k tokens (16.7%) came after the last version: worker-0 60.0k, worker-1 40.0k",
        "2 contributions came after their round had closed; their work went into the next ones",
        "1:23 since this start; 600k tokens trained",
        "3.00 MB",
        "20, 2.00 learners each",
    ):
        assert said in text
    assert "model" not in text


def test_the_summary_tells_the_last_tokens_from_those_that_workers_dropped_on_the_way() -> None:
    workers = tuple(Member(f"worker-{i}", "worker", "up", worker(i, tokens_unmerged=10_000)) for i in range(2))
    said = summary(make_report(of(*workers), Settings(), wall_s=1.0, evaluation=None), {})
    assert "the last 20.0k tokens (3.3%) came after the last version: worker-0 10.0k, worker-1 10.0k\n" in said
    dropped = "580k more tokens are in no version: a worker drops what it has not sent when it is interrupted or dies\n"
    assert dropped in said


@pytest.mark.parametrize(
    ("budget", "merged", "proposed"),
    [(200_000, 201_000, "400k"), (200_000, 30_000, "400k"), (5, 31_000, "62.0k")],
)
def test_the_budget_that_is_proposed_next_is_above_what_is_merged(budget: int, merged: int, proposed: str) -> None:
    report = make_report(
        cluster().cluster, Settings.model_validate({"run": {"tokens": budget}}), wall_s=1.0, evaluation=None
    )
    said = summary(report | {"tokens_merged": merged}, {}, Path("run"))
    assert f"diloco resume run --tokens {proposed} trains on" in said


def test_the_summary_names_at_most_eight_workers_whose_last_tokens_were_not_merged() -> None:
    workers = tuple(Member(f"worker-{i}", "worker", "up", worker(i, tokens_unmerged=i)) for i in range(11))
    report = make_report(of(*workers), Settings(), wall_s=1.0, evaluation=None)
    assert report["tokens_unmerged"] == {f"worker-{i}": i for i in range(11)}
    named = ", ".join(f"worker-{i} {i}" for i in range(10, 2, -1))
    assert f"after the last version: {named}, 2 more\n" in summary(report, {})


@pytest.mark.parametrize(
    ("value", "count", "size"),
    [
        (0, "0", "0 B"),
        (7, "7", "7 B"),
        (999, "999", "999 B"),
        (999.7, "1.00k", "1.00 kB"),
        (1234, "1.23k", "1.23 kB"),
        (12_345, "12.3k", "12.3 kB"),
        (1_234_567, "1.23M", "1.23 MB"),
        (2e9, "2.00G", "2.00 GB"),
    ],
)
def test_numbers_are_short_and_have_units(value: float, count: str, size: str) -> None:
    assert units.count(value) == count
    assert units.size(value) == size


@pytest.mark.parametrize(("seconds", "said"), [(0, "0:00"), (83.9, "1:23"), (3723, "1:02:03")])
def test_durations_read_like_a_clock(seconds: float, said: str) -> None:
    assert units.clock(seconds) == said


@pytest.mark.parametrize(
    ("values", "width", "drawn_as"),
    [([], 8, ""), ([1.0], 8, "▁"), ([0, 7], 8, "▁█"), ([0, 0, 7, 7], 2, "▁█"), ([3, 3], 2, "▁▁"), ([1.0], 0, "")],
)
def test_a_sparkline_has_at_most_its_width(values: list[float], width: int, drawn_as: str) -> None:
    assert units.sparkline(values, width) == drawn_as
