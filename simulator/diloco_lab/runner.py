"""Runs arms with all seeds, several at once and none twice, and estimates the time left.

Results are JSON lines with every setting. A run whose line is in the file is not repeated, so a stopped command resumes
where it was.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from diloco_common.allocator import tune_allocator
from diloco_common.child import end_with_parent
from diloco_demo.tracking import check_tracker, open_tracker
from diloco_lab.arms import Arm, key_today
from diloco_lab.lockstep import LockstepRun
from diloco_lab.references import classic_diloco, data_parallel
from diloco_lab.tasks import CURVE_TOKENS, EVALUATION_TOKENS, Task, builder

Pair = tuple[Arm, int]
Line = dict[str, Any]
DIVERGED = 1.05
"""A run has diverged if it stalled, or its loss is not finite or above this many times its loss before training."""
CURVE_POINTS = 12
TRACK_S = 60.0
"""Time for a tracker to open, and to write the curve of a run."""


def run_all(
    arms: Sequence[Arm], seeds: Sequence[int], path: Path, jobs: int, say: Callable[[str], None], track: str = ""
) -> dict[str, Line]:
    """Run whatever is missing in the file of results. Returns all requested results by key. `track`: also send their
    curves to this tracker (`diloco_demo.tracking`). Raises ConfigError."""
    if track:
        check_tracker(track)
    done = load(path)
    wanted = {arm.key(seed): (arm, seed) for seed in seeds for arm in arms}
    missing = [pair for key, pair in wanted.items() if key not in done]
    if len(missing) < len(wanted):
        say(f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {path} already")
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with path.open("a") as out:
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            out.write("\n")  # a crash has cut the last line off
        for count, line in enumerate(_results(missing, jobs), 1):
            out.write(json.dumps(line) + "\n")
            out.flush()
            done[line["key"]] = line
            if track:
                _track(track, line)
            left_s = (time.monotonic() - began) / count * (len(missing) - count)
            took = f"{_loss(line)} in {line['result']['wall_s']:.0f} s"
            say(f"[{count}/{len(missing)}] {line['arm']}, seed {line['seed']}: {took}; {_minutes(left_s)}")
    return {key: done[key] for key in wanted}


def run(arm: Arm, seed: int) -> Line:
    """One run on one thread. Equal runs give equal lines, except for `wall_s`."""
    torch.set_num_threads(1)
    tune_allocator()  # tensors of a step come and go: 15 % of the time of data-parallel runs
    began = time.perf_counter()
    settings = arm.seeded(seed)
    task = builder(arm.model)(settings, arm.conditions.non_iid)
    first = task.evaluate(task.model(), 1, EVALUATION_TOKENS)
    curve: list[list[float]] = []

    def watch(fraction: float, model: Callable[[], nn.Module]) -> None:
        if fraction < 1 and fraction * CURVE_POINTS >= len(curve) + 1:
            curve.append([round(fraction, 4), round(task.evaluate(model(), 1, CURVE_TOKENS), 5)])

    outcome, model = _train(arm, settings, task, watch)
    select, report = (task.evaluate(model, half, EVALUATION_TOKENS) for half in (0, 1))
    result = {
        "loss_first": round(first, 5), "loss_select": round(select, 5), "loss": round(report, 5),
        "curve": curve, "wall_s": round(time.perf_counter() - began, 1), **outcome,
    }  # fmt: skip
    return _line(arm, seed, result)


def _line(arm: Arm, seed: int, result: Line) -> Line:
    diverged = (
        not math.isfinite(result["loss"])
        or result["loss"] > DIVERGED * result["loss_first"]
        or result.get("stalled", False)
    )
    result = result | {"diverged": diverged}
    return {"key": arm.key(seed), "arm": arm.name, "seed": seed, **arm.facts(seed), "result": result}


def _results(pairs: Sequence[Pair], jobs: int) -> Iterator[Line]:
    """Results in order of completion, from this process or from `jobs` child processes, which end with this one."""
    if jobs == 1:
        yield from (run(*pair) for pair in pairs)
        return
    spawn = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=end_with_parent, initargs=(os.getpid(),)) as pool:
        try:
            for future in as_completed([pool.submit(run, *pair) for pair in pairs]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def load(path: Path) -> dict[str, Line]:
    """The results in a file, by key; none without a file. Skips torn lines, and those with settings that are gone."""
    found: dict[str, Line] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            found[key_today(line)] = line
        except (json.JSONDecodeError, KeyError, ValidationError):
            continue
    return found


def _track(spec: str, line: Line) -> None:
    tracker = open_tracker(spec, run="lab", name=f"{line['arm']}-{line['seed']}")
    budget, result = line["settings"]["run"]["tokens"], line["result"]
    for fraction, loss in [*result["curve"], (1.0, result["loss"])]:
        tracker.log(round(fraction * budget), {"loss": loss, "fraction": fraction, "tokens_merged": fraction * budget})
    tracker.close(TRACK_S)


def _train(
    arm: Arm, settings: Any, task: Task, watch: Callable[[float, Callable[[], nn.Module]], None]
) -> tuple[Line, nn.Module]:
    conditions = arm.conditions

    def on_step(fraction: float, model: nn.Module) -> None:
        watch(fraction, lambda: model)

    match conditions.method:
        case "data-parallel":
            return {}, data_parallel(settings, task, conditions.learners, on_step)
        case "one-process":
            return {}, data_parallel(settings, task, 1, on_step, conditions.batches)
        case "classic":
            return {}, classic_diloco(settings, task, conditions.learners, on_step)
    lockstep = LockstepRun(settings, task, conditions)
    outcome = lockstep.run(lambda fraction: watch(fraction, lockstep.global_model))
    return asdict(outcome), lockstep.global_model()


def _loss(line: Line) -> str:
    result = line["result"]
    return f"{result['loss']:.4f}" + (" DIVERGED" if result["diverged"] else "")


def _minutes(seconds: float) -> str:
    return (
        "done" if seconds <= 0 else f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
    )
