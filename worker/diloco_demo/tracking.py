"""Curves of a run in a tracker: `tensorboard:DIR`, `wandb:PROJECT` or `csv:FILE`.

`Tracker.log` never blocks: a thread writes, and points that do not fit its queue are dropped and counted. If a tracker
fails, tracking stops with one log line, and training goes on. Nothing leaves this machine: wandb writes offline runs
(`wandb sync` uploads them), unless WANDB_MODE says otherwise.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from diloco_common.errors import ConfigError
from diloco_common.wire.calls import SETTLE_S
from diloco_demo.training import InnerStep, Synchroniser

log = logging.getLogger(__name__)

FIGURES = ("loss", "rate_share", "tokens", "tokens_merged", "fraction")
"""The tracked figures: the columns of a csv file after `run`, `name` and `step`."""
WAITING_MAX = 1024
Figures = Mapping[str, float]


class Sink(Protocol):
    """The output of a tracker. Used in one thread."""

    def write(self, step: int, figures: Figures) -> None:
        """Write one point of every curve."""

    def close(self) -> None: ...


Opens = Callable[[], Sink]


class Tracker:
    """Passes points to a thread that opens, writes and closes a sink."""

    def __init__(self, opens: Opens) -> None:
        self.dropped = 0
        """Points lost because the sink was too slow."""
        self._opens = opens
        self._waiting: queue.Queue[tuple[int, Figures] | None] = queue.Queue(WAITING_MAX)
        self._thread = threading.Thread(target=self._write_all, name="tracker", daemon=True)
        self._thread.start()

    def log(self, step: int, figures: Figures) -> None:
        """Take one point of every curve. Returns at once."""
        try:
            self._waiting.put_nowait((step, figures))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = SETTLE_S) -> None:
        """Write the waiting points for at most `timeout_s` seconds, and log if that was too short."""
        ends = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, ends - time.monotonic()))
        if self._thread.is_alive():
            log.warning("the tracker did not write everything, its last points are lost: waited_s=%g", timeout_s)
        if self.dropped:
            log.warning("tracker was too slow: points_dropped=%d", self.dropped)

    def _write_all(self) -> None:
        try:
            sink = self._opens()
            while (point := self._waiting.get()) is not None:
                sink.write(*point)
            sink.close()
        except Exception as error:  # whatever a tracker's library raises, training goes on
            log.warning("tracking has ended, training goes on: error=%s: %s", type(error).__name__, error)
            while self._waiting.get() is not None:
                pass


class StepTracker:
    """Follows the inner steps of the built-in training, and tracks their mean every `every_s` seconds."""

    def __init__(
        self, tracker: Tracker, synchroniser: Synchroniser, every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._tracker, self._synchroniser = tracker, synchroniser
        self._every_s, self._clock = every_s, clock
        self._tracked_at = clock()
        self._losses: list[Tensor] = []
        self._last: InnerStep | None = None

    def __call__(self, step: InnerStep) -> None:
        self._losses.append(step.loss)
        self._last = step
        if (now := self._clock()) - self._tracked_at >= self._every_s:
            self._tracked_at = now
            self._track(step)

    def close(self) -> None:
        """Track the steps since the last point, and close the tracker."""
        if self._losses and self._last is not None:
            self._track(self._last)
        self._tracker.close()

    def _track(self, step: InnerStep) -> None:
        loss = float(torch.stack(self._losses).mean())
        self._losses.clear()
        self._tracker.log(
            step.progress.inner_step,
            {
                "loss": loss, "rate_share": step.rate_share, "tokens": step.progress.tokens,
                "tokens_merged": self._synchroniser.tokens_merged, "fraction": self._synchroniser.fraction,
            },
        )  # fmt: skip


def check_tracker(spec: str) -> None:
    """Raises ConfigError if there is no such tracker, or its package is not installed."""
    kind, colon, where = spec.partition(":")
    if not colon or not where or kind not in _SINKS:
        raise ConfigError(f"track {spec!r} is none of tensorboard:DIR, wandb:PROJECT and csv:FILE")
    if kind != "csv" and importlib.util.find_spec(kind) is None:
        raise ConfigError(f"track {spec!r} needs the package {kind}: pip install {kind}")


def open_tracker(spec: str, *, run: str, name: str) -> Tracker:
    """A tracker for one learner, or one run of the lab; `name` identifies it. Raises ConfigError."""
    check_tracker(spec)
    kind, _, where = spec.partition(":")
    return Tracker(lambda: _SINKS[kind](where, run, name))


class _Csv:
    """Rows in one csv file, to which several processes may append."""

    def __init__(self, path: str, run: str, name: str) -> None:
        self._name = run, name
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o666))
            is_new = True
        except FileExistsError:
            is_new = False
        self._file = open(path, "a", newline="", buffering=1)  # noqa: SIM115 a line at a time, so rows stay whole
        self._rows = csv.writer(self._file)
        if is_new:
            self._rows.writerow(("run", "name", "step", *FIGURES))

    def write(self, step: int, figures: Figures) -> None:
        self._rows.writerow((*self._name, step, *(figures.get(key, "") for key in FIGURES)))

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, folder: str, run: str, name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(Path(folder) / run / name))

    def write(self, step: int, figures: Figures) -> None:
        for key, value in figures.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, project: str, run: str, name: str) -> None:
        wandb = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(project=project, group=run, name=name, mode=mode)

    def write(self, step: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


_SINKS: dict[str, Callable[[str, str, str], Sink]] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "csv": _Csv}
