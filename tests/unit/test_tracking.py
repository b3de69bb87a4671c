"""Trackers: they never hold up training, lose points rather than time, and write what a reader expects."""

from __future__ import annotations

import csv
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diloco_common.errors import ConfigError
from diloco_common.settings import Settings, WorkerSettings
from diloco_demo import cli, tracking
from diloco_demo.checkpoint import TrainingProgress
from diloco_demo.tracking import FIGURES, WAITING_MAX, StepTracker, Tracker, open_tracker
from diloco_demo.training import InnerStep
from diloco_worker import joining


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


class Broken(Kept):
    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self.points.append((step, figures))
        raise OSError("disk full")


def test_a_sink_that_hangs_costs_points_and_no_time(caplog: pytest.LogCaptureFixture) -> None:
    sink = Kept()
    tracker = Tracker(lambda: sink)
    for step in range(WAITING_MAX + 100):
        tracker.log(step, {"loss": 1.0})
    assert 98 <= tracker.dropped <= 100
    tracker.close(timeout_s=0.0)
    sink.may_write.set()
    assert "its last points are lost" in caplog.text


def test_a_sink_that_fails_ends_tracking_alone(caplog: pytest.LogCaptureFixture) -> None:
    sink = Broken()
    tracker = Tracker(lambda: sink)
    for step in range(3):
        tracker.log(step, {"loss": 1.0})
    tracker.close()
    assert len(sink.points) == 1
    assert "training goes on: error=OSError: disk full" in caplog.text


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


@pytest.mark.parametrize("spec", ["csv:", "csv", "paper:x", "", "tensorboard:"])
def test_a_tracker_that_cannot_be_is_refused_at_the_start(spec: str) -> None:
    with pytest.raises(ConfigError, match="tensorboard:DIR"):
        open_tracker(spec, run="r", name="n")


def test_a_worker_whose_tracker_cannot_be_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "join", lambda *_, **__: pytest.fail("it has joined"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    nothing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(tracking, "importlib", nothing)
    settings = Settings(worker=WorkerSettings(shards=("127.0.0.1:1",), track="wandb:p"))
    with pytest.raises(ConfigError, match="pip install wandb"):
        cli._train(settings, cli._Outputs(None, None, None, None, None))


def test_tensorboard_gets_a_folder_for_each_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = open_tracker(f"tensorboard:{tmp_path}", run="r", name="worker-0")
    tracker.log(1, {"loss": 2.0})
    tracker.close()
    assert any((tmp_path / "r" / "worker-0").glob("events*"))


class Merged:
    tokens_merged, fraction, done = 48, 0.25, False

    def step(self, tokens: int, loss: object = None) -> None: ...


def test_steps_are_tracked_by_the_second_with_their_mean_loss() -> None:
    sink, now = Kept(), [0.0]
    sink.may_write.set()
    tracker = Tracker(lambda: sink)
    steps = StepTracker(tracker, Merged(), every_s=1.0, clock=lambda: now[0])
    for i, loss in enumerate((4.0, 2.0, 9.0)):
        now[0] += 0.5
        steps(InnerStep(TrainingProgress(i + 1, 8 * (i + 1), 0), torch.tensor(loss), 0.5))
    steps.close()
    assert [step for step, _ in sink.points] == [2, 3], "the last steps count too"
    assert sink.points[:1] == [
        (2, {"loss": 3.0, "rate_share": 0.5, "tokens": 16, "tokens_merged": 48, "fraction": 0.25})
    ]
    assert tuple(sink.points[0][1]) == FIGURES
