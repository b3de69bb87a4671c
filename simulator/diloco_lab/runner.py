"""Runs arms with all seeds, several at once and none twice, estimates the time left, and shows the results.

Results are JSON lines with every setting. A run whose line is in the file is not repeated, so a stopped command resumes
where it stopped.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from diloco_common.process import end_with_parent, tune_allocator
from diloco_lab.arms import Arm, key_today
from diloco_lab.lockstep import LockstepRun
from diloco_lab.tasks import CURVE_TOKENS, EVALUATION_TOKENS, Task, builder, classic_diloco, data_parallel

Pair = tuple[Arm, int]
Line = dict[str, Any]
DIVERGED = 1.05
"""A run has diverged if it stalled, or its loss is not finite or above this many times its loss before training."""
CURVE_POINTS = 12


def run_all(
    arms: Sequence[Arm], seeds: Sequence[int], path: Path, jobs: int, say: Callable[[str], None]
) -> dict[str, Line]:
    """Do all runs that are missing in the file of results. Returns all requested results by key."""
    done = load(path)
    wanted = {arm.key(seed): (arm, seed) for seed in seeds for arm in arms}
    missing = [pair for key, pair in wanted.items() if key not in done]
    if len(missing) < len(wanted):
        say(f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {path} already")
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with path.open("a") as out:
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            out.write("\n")  # a crash cut off the last line
        for count, line in enumerate(_results(missing, jobs), 1):
            out.write(json.dumps(line) + "\n")
            out.flush()
            done[line["key"]] = line
            left_s = (time.monotonic() - began) / count * (len(missing) - count)
            took = f"{_loss(line)} in {line['result']['wall_s']:.0f} s"
            say(f"[{count}/{len(missing)}] {line['arm']}, seed {line['seed']}: {took}; {_minutes(left_s)}")
    return {key: done[key] for key in wanted}


def run(arm: Arm, seed: int) -> Line:
    """One run on one thread. Equal runs give equal lines, except for `wall_s`."""
    torch.set_num_threads(1)
    tune_allocator()  # allocating the tensors of each step would take 15 % of the time of data-parallel runs
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
    """The results in a file, by key; none without a file. Skips torn lines, and those with removed settings."""
    found: dict[str, Line] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            found[key_today(line)] = line
        except (json.JSONDecodeError, KeyError, ValidationError):
            continue
    return found


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


T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantile of Student's t, by degrees of freedom from 1 on."""


@dataclass(frozen=True)
class Gap:
    """How far the loss of an arm is above that of another, in percent."""

    mean: float
    half_width: float
    """Half of the 95 % interval; inf for one pair."""
    pairs: int

    def __str__(self) -> str:
        sure = "one pair" if self.pairs == 1 else f"[{self.low:+.2f}, {self.high:+.2f}], {self.pairs} pairs"
        return f"{self.mean:+.2f} % ({sure})"

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def paired_gap(arm: Sequence[float], base: Sequence[float]) -> Gap:
    """The mean gap between losses of equal seeds. Needs at least one pair."""
    gaps = [100 * (a / b - 1) for a, b in zip(arm, base, strict=True)]
    n = len(gaps)
    if n == 1:
        return Gap(gaps[0], math.inf, 1)
    quantile = T_975[n - 2] if n - 2 < len(T_975) else 1.96
    return Gap(fmean(gaps), quantile * stdev(gaps) / math.sqrt(n), n)


def gap(arm: Arm, base: Arm, seeds: Sequence[int], lines: Mapping[str, Line]) -> Gap | None:
    """The paired gap over the seeds for which neither arm diverged. None: there is no such seed."""
    pairs = [(lines[arm.key(s)]["result"], lines[base.key(s)]["result"]) for s in seeds]
    whole = [(a["loss"], b["loss"]) for a, b in pairs if not a["diverged"] and not b["diverged"]]
    return paired_gap([a for a, _ in whole], [b for _, b in whole]) if whole else None


def comparison(arms: Sequence[Arm], seeds: Sequence[int], lines: Mapping[str, Line]) -> str:
    """A table: each arm's mean loss, and its paired gap to the first arm with the 95 % interval."""
    base, rows = arms[0], [("arm", "loss", "diverged", f"above {arms[0].name}, paired, 95 %")]
    for arm in arms:
        results = [lines[arm.key(seed)]["result"] for seed in seeds]
        whole = [r["loss"] for r in results if not r["diverged"]]
        mean = f"{fmean(whole):.4f}" if whole else "-"
        found = None if arm is base else gap(arm, base, seeds, lines)
        rows.append((arm.name, mean, f"{len(results) - len(whole)} of {len(results)}", str(found or "-")))
    return table(rows)


def ranking(
    arms: Sequence[Arm], values: Sequence[Mapping[str, object]], seeds: Sequence[int], lines: Mapping[str, Line]
) -> str:
    """A table of a sweep's arms, the best on the selecting half first; and which best values are at the grid's edge."""
    losses = [fmean(selecting(lines[arm.key(seed)]) for seed in seeds) for arm in arms]
    order = sorted(range(len(arms)), key=lambda i: losses[i])
    names = list(values[0])
    rows = [(*names, "loss to select by")]
    rows += [(*(str(values[i][name]) for name in names), f"{losses[i]:.4f}") for i in order]
    best, said = values[order[0]], []
    for name in names:
        tried = sorted({v for setting in values if isinstance(v := setting[name], (int, float))})
        if len(tried) > 1 and best[name] in (tried[0], tried[-1]):
            said.append(f"{name} = {best[name]} lies at the edge of the grid, so it may be no optimum: widen the grid")
    return "\n".join([table(rows), *said])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def selecting(line: Line) -> float:
    result = line["result"]
    return math.inf if result["diverged"] else float(result["loss_select"])
