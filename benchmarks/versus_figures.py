"""From what the workers of one run wrote down to the figures of versus.py."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from versus_task import SmallGpt, Task, loss_of, make_model, read_bytes

HELD_OUT_BYTES = 4096
COUNTS_OWN = {"hivemind"}
"""Each worker counts its own merged tokens. In the other systems, each knows those of all."""


@dataclass(frozen=True)
class Window:
    """What of a run is measured, in seconds of the monotonic clock."""

    go: float
    began: float
    ended: float
    sent_bytes: int
    load: float
    """Average of the machine, at the end."""
    stood_still_s: float = 0.0
    """The longest time by which the driver, which only sleeps, woke up too late: then nobody had this machine."""


@dataclass(frozen=True)
class Steps:
    """Of one process of one worker, at the ends of its inner steps."""

    at: list[float]
    tokens: list[float]
    merged: list[float]


def of_run(task: Task, case: str, window: Window, system: str) -> dict[str, Any]:
    """All figures of a run as JSON."""
    workers = {rank: read_steps(Path(task.folder), rank) for rank in range(task.workers)}
    seconds = window.ended - window.began
    trained = sum(
        tokens
        for processes in workers.values()
        for steps in processes
        for at, tokens in zip(steps.at, steps.tokens, strict=True)
        if window.began < at <= window.ended
    )
    own = system in COUNTS_OWN
    merged = merged_at(workers, window.ended, own) - merged_at(workers, window.began, own)
    honest = [rank for rank in workers if case == "plain" or rank != task.workers - 1]
    stalls = sorted(s for rank in honest for s in stalls_of(workers[rank], task.step_s, window))
    return {
        "seconds": round(seconds, 1),
        "trained_per_s": round(trained / seconds, 1),
        "merged_per_s": round(merged / seconds, 1),
        "stall_median_s": round(median(stalls), 4),
        "stall_p99_s": round(stalls[min(len(stalls) - 1, int(0.99 * len(stalls)))], 4),
        "stall_max_s": round(stalls[-1], 4),
        "steps": len(stalls),
        "bytes_per_token": round(window.sent_bytes / trained, 1) if trained else None,
        "load": round(window.load, 2),
        "stood_still_s": round(window.stood_still_s, 4),
        "losses": losses(task),
    }


def read_steps(folder: Path, rank: int) -> list[Steps]:
    """Of each process of this worker, the oldest first."""
    paths = sorted(folder.glob(f"steps-{rank}-*.txt"), key=lambda p: float(p.stem.split("-")[2]))
    found = []
    for path in paths:
        lines = [line.split() for line in path.read_text().splitlines()]
        rows = [[float(word) for word in words] for words in lines if len(words) == 3]
        found.append(Steps(*([row[i] for row in rows] for i in range(3))))
    return found


def merged_at(workers: dict[int, list[Steps]], at: float, own: bool) -> float:
    """Tokens that were merged by then: a straight line between two moments at which a worker saw the count grow.

    Systems merge in lumps of H steps. The line keeps the lumps at the ends of a window from making a difference.
    """
    if own:
        return sum(_merged_by(steps, at) for processes in workers.values() for steps in processes)
    return max((_merged_by(steps, at) for processes in workers.values() for steps in processes), default=0.0)


def _merged_by(steps: Steps, at: float) -> float:
    if not steps.at:
        return 0.0
    grown = [(steps.at[0], steps.merged[0])]
    for t, merged in zip(steps.at, steps.merged, strict=True):
        if merged > grown[-1][1]:
            grown.append((t, merged))
    for (t0, m0), (t1, m1) in pairwise(grown):
        if t0 <= at < t1:
            return m0 + (m1 - m0) * (at - t0) / (t1 - t0)
    return grown[-1][1] if at >= grown[-1][0] else 0.0


def stalls_of(processes: Sequence[Steps], step_s: float, window: Window) -> list[float]:
    """Seconds beyond the time of computing, of each step in the window. The time between two processes counts, and the
    time from the last step to the end, if that is more than a step."""
    ends = [t for steps in processes for t in steps.at if t <= window.ended]
    found = [b - a - step_s for a, b in pairwise(ends) if b > window.began]
    rest = window.ended - (ends[-1] if ends else window.began) - step_s
    return [*found, rest] if rest > 0 else found


def losses(task: Task) -> list[tuple[float, float]]:
    """Seconds since the beginning -> held-out loss of the mean of the models of all workers, in nats per byte.

    The mean stands for the model that a system would hand out. With DDP all models are equal.
    """
    by_number: dict[int, list[Path]] = defaultdict(list)
    for path in Path(task.folder).glob("model-*.pt"):
        match = re.fullmatch(r"model-(\d+)-(\d+)", path.stem)
        assert match is not None
        by_number[int(match[1])].append(path)
    text = read_bytes(Path(task.folder, "held.bin"))[: HELD_OUT_BYTES + 1].long()
    model = make_model(task)
    return [
        (round(number * task.snapshot_s, 1), round(_loss(model, text, task, paths), 4))
        for number, paths in sorted(by_number.items())
    ]


def _loss(model: SmallGpt, text: torch.Tensor, task: Task, paths: list[Path]) -> float:
    states = [torch.load(path) for path in paths]
    model.load_state_dict({name: sum(s[name].float() for s in states) / len(states) for name in states[0]})
    windows = len(text) // task.context
    inputs = text[: windows * task.context].view(windows, task.context)
    targets = text[1 : windows * task.context + 1].view(windows, task.context)
    with torch.no_grad():
        return float(loss_of(model(inputs), targets))
