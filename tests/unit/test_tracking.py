"""Trackers: they never hold up training, lose points rather than time, and write what a reader expects."""

from __future__ import annotations

import csv
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from diloco_demo.tracking import WAITING_MAX, Tracker, open_tracker


class Kept:
    """A sink that keeps what it is given, once it may."""

    def __init__(self) -> None:
        self.points: list[tuple[int, Mapping[str, float]]] = []
        self.may_write = threading.Event()
        self.closed = False

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self.may_write.wait(30)
        self.points.append((step, figures))

    def close(self) -> None:
        self.closed = True


def test_a_sink_that_hangs_costs_points_and_no_time(caplog: pytest.LogCaptureFixture) -> None:
    sink = Kept()
    tracker = Tracker(lambda: sink)
    for step in range(WAITING_MAX + 100):
        tracker.log(step, {"loss": 1.0})
    assert 98 <= tracker.dropped <= 100
    tracker.close(timeout_s=0.0)
    sink.may_write.set()
    assert "its last points are lost" in caplog.text


def test_a_csv_file_of_several_learners_has_one_head(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.csv"
    for name in ("a", "b"):
        tracker = open_tracker(f"csv:{path}", run="r", name=name)
        tracker.log(7, {"loss": 1.5, "tokens": 20})
        tracker.close()
    rows = list(csv.DictReader(path.open()))
    assert [(row["run"], row["name"], row["step"], row["loss"], row["fraction"]) for row in rows] == [
        ("r", "a", "7", "1.5", ""), ("r", "b", "7", "1.5", ""),
    ]  # fmt: skip
    assert not path.stat().st_mode & 0o111
