"""What `learner.step` costs a training loop while fragments fly both ways: real shards, real learners, 100 ms steps.

    python benchmarks/step_cost.py                     # 1 learner, 2 shards, 100 M parameters: about 75 s
    python benchmarks/step_cost.py --steps 100         # shorter
    python benchmarks/step_cost.py --json cost.json

A step sleeps for most of its time, as a loop does whose accelerator computes, and changes a 24th of the parameters. With
P = H = 24 about one fragment is contributed and one version is applied per step. Measured over steps after every fragment
had its second version: the seconds inside `learner.step`, and the mean seconds of a step of the loop, beside those of the
same loop before the learner joined and after it left.

Exits with 1 if `learner.step` took more than 1 % of a 100 ms step in the median or more than 10 ms at the 99th
percentile, or if fewer than half a contribution was merged or half a version applied per step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from light_learners import running_shard, tensors_of
from outer_round_learner import Weights, usage

import diloco_worker
from diloco_common.manifest import TensorSpec

STEP_S = 0.1
SLEEP_S = 0.095
"""Of a step; the rest is for what it does itself."""
STEP_TOKENS = 1000
CHANGE = 1e-4
PARTS = 24
"""One of them is changed per step."""
BASELINE_STEPS = 50
MEDIAN_MAX_S = 0.01 * STEP_S
P99_MAX_S = 0.01
FLYING_MIN = 0.5
WAIT_S = 120.0


@dataclass(frozen=True)
class LoopSpec:
    """What a learner process needs to know."""

    rank: int
    shards: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    steps: int
    """To measure."""


# ------------------------------------------------------------ the learner process


class Loop:
    """A training loop without data, loss or gradients."""

    def __init__(self, tensors: Sequence[TensorSpec], rank: int) -> None:
        self.model = Weights(tensors)
        self._noise = torch.randn(1 << 16, generator=torch.Generator().manual_seed(rank)).mul_(CHANGE)
        self._flat = [parameter.detach().view(-1) for parameter in self.model.parameters()]
        self._number = 0

    def step(self) -> None:
        """What a step does but for `learner.step`."""
        time.sleep(SLEEP_S)
        self._number += 1
        for flat in self._flat:
            size = -(-flat.numel() // PARTS)
            start = self._number % PARTS * size
            for part in flat[start : start + size].split(self._noise.numel()):
                part.add_(self._noise[: part.numel()])

    def alone(self, steps: int) -> list[float]:
        """Seconds of each step without a learner."""
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - began)
        return seconds


def run_loop(spec: LoopSpec, pipe: Connection) -> None:
    """The process: sends what it measured, and ends."""
    torch.set_num_threads(1)
    loop = Loop(spec.tensors, spec.rank)
    mean_merge = {t.name.replace(".", "_") for t in spec.tensors if t.mean_merge}
    alone = loop.alone(BASELINE_STEPS)
    learner = diloco_worker.join(
        spec.shards, loop.model, learner_id=f"learner-{spec.rank}", mean_merge=mean_merge, wait_s=WAIT_S
    )
    with learner:
        measured = synchronised(loop, learner, spec.steps)
    measured["alone_s"] = alone + loop.alone(BASELINE_STEPS)
    measured["rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send(measured)


def synchronised(loop: Loop, learner: diloco_worker.Learner, steps: int) -> dict[str, Any]:
    """Train until every fragment has its second version, then measure so many steps."""
    assert learner.core is not None
    fragments = learner.core.fragments.values()
    deadline = time.monotonic() + WAIT_S
    while any(f.version < 2 for f in fragments):
        if time.monotonic() > deadline:
            sys.exit(f"not every fragment had its second version within {WAIT_S:.0f} s")
        loop.step()
        learner.step(STEP_TOKENS, 1.0)
    before, applied_before, merged_before = usage(learner), applied(learner), learner.core.contributions["merged"]
    inside, whole = [], []
    for _ in range(steps):
        began = time.perf_counter()
        loop.step()
        trained = time.perf_counter()
        learner.step(STEP_TOKENS, 1.0)
        ended = time.perf_counter()
        inside.append(ended - trained)
        whole.append(ended - began)
    after = usage(learner)
    return {
        "inside_s": inside,
        "whole_s": whole,
        "applied": applied(learner) - applied_before,
        "merged": learner.core.contributions["merged"] - merged_before,
        "phases_cpu_s": {p: after["phases_cpu_s"][p] - before["phases_cpu_s"][p] for p in after["phases_cpu_s"]},
        "cpu_s": after["cpu_s"] - before["cpu_s"],
    }


def applied(learner: diloco_worker.Learner) -> int:
    """Versions applied so far."""
    return int(learner.metrics.registry.get_sample_value("diloco_worker_apply_seconds_count") or 0)


# ------------------------------------------------------------ the run


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run it all; what `--json` writes."""
    tensors = tensors_of(int(args.params))
    settings = [f"shard.count={args.shards}", f"sync.push={args.push}", f"sync.pull={args.pull}"]
    with ExitStack() as stack:
        shards = [stack.enter_context(running_shard(*settings, f"shard.index={i}")) for i in range(args.shards)]
        addresses = tuple(shard.address for shard in shards)
        spawn = multiprocessing.get_context("spawn")
        pipes = []
        for rank in range(args.learners):
            pipe, theirs = spawn.Pipe()
            process = spawn.Process(
                target=run_loop, args=(LoopSpec(rank, addresses, tensors, args.steps), theirs), daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(process.kill)
            pipes.append(pipe)
        try:
            found = [pipe.recv() for pipe in pipes]
        except EOFError:
            sys.exit("a learner ended before it had measured anything")
    inside = sorted(s for f in found for s in f["inside_s"])
    per_step = 1 / (args.steps * args.learners)
    cost = {
        "median": median(inside), "p90": percentile(inside, 90), "p99": percentile(inside, 99), "max": inside[-1],
    }  # fmt: skip
    applied, merged = (per_step * sum(f[what] for f in found) for what in ("applied", "merged"))
    phases = {p: per_step * sum(f["phases_cpu_s"][p] for f in found) for p in found[0]["phases_cpu_s"]}
    return {
        "parameters": sum(t.num_elements for t in tensors), "learners": args.learners, "shards": args.shards,
        "push": args.push, "pull": args.pull, "steps": args.steps,
        "step_cost_seconds": cost,
        "step_seconds_alone": fmean(s for f in found for s in f["alone_s"]),
        "step_seconds_synchronised": fmean(s for f in found for s in f["whole_s"]),
        "versions_applied_per_step": applied, "contributions_merged_per_step": merged,
        "phases_cpu_seconds_per_step": phases,
        "learner_cpu_seconds_per_step": per_step * sum(f["cpu_s"] for f in found),
        "learner_rss_bytes": [f["rss_bytes"] for f in found],
        "ok": cost["median"] <= MEDIAN_MAX_S and cost["p99"] <= P99_MAX_S and min(applied, merged) >= FLYING_MIN,
    }  # fmt: skip


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest of them that so many percent do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def show(r: dict[str, Any]) -> None:
    cost, phases = r["step_cost_seconds"], r["phases_cpu_seconds_per_step"]
    alone, synchronised = r["step_seconds_alone"], r["step_seconds_synchronised"]
    print(
        f"{r['parameters'] / 1e6:.1f} M parameters, {r['learners']} learner(s), {r['shards']} shards, push {r['push']}, "
        f"pull {r['pull']}, {r['steps']} steps of {1000 * STEP_S:.0f} ms"
    )
    print("inside learner.step   " + ", ".join(f"{name} {1000 * s:.2f} ms" for name, s in cost.items()))
    print(f"  of a step           {100 * cost['median'] / STEP_S:.2f} % in the median  (at most 1 %, and 10 ms at p99)")
    print(
        f"a step of the loop    {1000 * synchronised:.2f} ms, without a learner {1000 * alone:.2f} ms: "
        f"{100 * (synchronised / alone - 1):+.1f} %"
    )
    print(
        f"per step              {r['versions_applied_per_step']:.2f} versions applied, "
        f"{r['contributions_merged_per_step']:.2f} contributions merged"
    )
    print("CPU time per step     " + ", ".join(f"{p} {1000 * s:.1f} ms" for p, s in phases.items())
          + f"; all of the process {1000 * r['learner_cpu_seconds_per_step']:.1f} ms")  # fmt: skip
    print(f"peak RSS              {max(r['learner_rss_bytes']) / 1e6:.0f} MB, {4 * r['parameters'] / 1e6:.0f} MB of it "
          "the parameters")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=100e6, metavar="N", help="parameters (default: 100e6)")
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--push", default="int8", help="encoding of contributions (sync.push)")
    parser.add_argument("--pull", default="bfloat16", help="encoding of versions (sync.pull)")
    parser.add_argument("--steps", type=int, default=400, help="measured steps (default: 400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    result = measure(args)
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
