"""The cost of `learner.step` for a training loop under full traffic: real shards, real learners, steps of 100 ms.

    python benchmarks/step_cost.py                  # 1 learner, 2 shards, 100 M parameters: about 40 s
    python benchmarks/step_cost.py --steps 100      # shorter

A step sleeps for most of its time, like a loop that waits for its accelerator, and changes a 24th of the parameters.
With P = H = 24, about one fragment is contributed and one version applied per step. For comparison, the loop also adds
one tensor of a fragment's size to another: applying a version cannot cost less. Snapshots, which are complete when
`step` returns, are reported separately, with the time to copy another fragment's values just before.

Exits with 1 if `learner.step` without its snapshots took more than 1 % of a 100 ms step in the median or more than 10
ms at the 99th percentile, if a snapshot took longer than a copy (medians), or if fewer than half a contribution was
merged or half a version applied per step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Any

import torch

import diloco_worker
from diloco_common.process import tune_allocator
from diloco_common.wire.manifest import TensorSpec
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.tensors import ContributionTensors, FragmentTensors
from light_learners import running_shards, tensors_of
from outer_round import Weights

STEP_S = 0.1
SLEEP_S = 0.095
"""Sleep in each step. The rest is work."""
STEP_TOKENS = 1000
CHANGE = 1e-4
PARTS = 24
"""Number of parts of the parameters. Each step changes one part."""
TENSORS = 500
"""Approximate number of tensors; a fragment has about 21."""
FRAGMENTS = 24
SETTLE_STEPS = 5
MEDIAN_MAX_S = 0.01 * STEP_S
P99_MAX_S = 0.01
FLYING_MIN = 0.5
WAIT_S = 120.0


@dataclass
class Measured:
    """The measurements of a learner process. Lists have one entry per step."""

    inside_s: list[float] = field(default_factory=list)
    """Seconds inside `learner.step`."""
    addition_s: list[float] = field(default_factory=list)
    """Seconds of the addition for comparison, just before `learner.step`, under the same traffic."""
    copy_s: list[float] = field(default_factory=list)
    """Seconds to copy another fragment's values, also just before `learner.step`."""
    snapshot_s: list[float] = field(default_factory=list)
    """Seconds inside `learner.step` for the snapshots of that step."""
    counts: dict[str, float] = field(default_factory=dict)
    """Totals over the steps with `learner.step`."""


# ------------------------------------------------------------ the learner process


class Loop:
    """A training loop without data, loss or gradients."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self.model = Weights(tensors)
        self._noise = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).mul_(CHANGE)
        self._flat = [parameter.detach().view(-1) for parameter in self.model.parameters()]
        self._number = 0
        size = sum(flat.numel() for flat in self._flat) // FRAGMENTS
        self._pairs = [(torch.ones(size), torch.ones(size)) for _ in range(4)]  # ones, so that memory is allocated
        self._copy = torch.ones(2 * size)

    def step(self) -> None:
        """A step without `learner.step`."""
        time.sleep(SLEEP_S)
        self._number += 1
        for flat in self._flat:
            size = -(-flat.numel() // PARTS)
            start = self._number % PARTS * size
            for part in torch.split(flat[start : start + size], self._noise.numel()):
                part.add_(self._noise[: part.numel()])

    def add_once(self) -> float:
        """Seconds to add a tensor of a fragment's size to another. Uses a different pair each time, in turn."""
        values, difference = self._pairs[self._number % len(self._pairs)]
        began = time.perf_counter()
        values.add_(difference)
        return time.perf_counter() - began

    def copy_once(self, core: LearnerCore) -> float:
        """Seconds to copy the parameters of a fragment. Copies a different fragment each time."""
        tensors = core.fragments[self._number % len(core.fragments)].tensors
        out = self._copy[: tensors.fragment.num_elements]
        began = time.perf_counter()
        tensors._replica.read(tensors.fragment, out)
        return time.perf_counter() - began


def run_loop(shards: Sequence[str], tensors: Sequence[TensorSpec], steps: int, pipe: Connection) -> None:
    """The learner process: measures `steps` steps, sends the results, and ends."""
    tune_allocator()  # as diloco-worker does
    torch.set_num_threads(1)
    loop = Loop(tensors)
    mean_merge = {t.name.replace(".", "_") for t in tensors if t.rule == "mean"}
    with diloco_worker.join(shards, loop.model, mean_merge=mean_merge, wait_s=WAIT_S) as learner:
        reach_second_versions(loop, learner)
        pipe.send(measure_steps(loop, learner, steps))


def reach_second_versions(loop: Loop, learner: diloco_worker.Learner) -> None:
    """Train until every fragment has its second version."""
    assert learner.core is not None
    fragments = learner.core.fragments.values()
    deadline = time.monotonic() + WAIT_S
    while any(f.version < 2 for f in fragments):
        if time.monotonic() > deadline:
            sys.exit(f"not every fragment had its second version within {WAIT_S:.0f} s")
        loop.step()
        learner.step(STEP_TOKENS, 1.0)


def measure_steps(loop: Loop, learner: diloco_worker.Learner, steps: int) -> dict[str, Any]:
    m = Measured()
    snapshots = time_snapshots()
    assert learner.core is not None
    for _ in range(SETTLE_STEPS):
        loop.step()
        learner.step(STEP_TOKENS, 1.0)
    before = counts(learner)
    for _ in range(steps):
        loop.step()
        m.addition_s.append(loop.add_once())
        m.copy_s.append(loop.copy_once(learner.core))
        snapshots.clear()
        began = time.perf_counter()
        learner.step(STEP_TOKENS, 1.0)
        m.inside_s.append(time.perf_counter() - began)
        m.snapshot_s.append(sum(snapshots))
    m.counts = {name: after - before[name] for name, after in counts(learner).items()}
    return asdict(m)


def time_snapshots() -> list[float]:
    """A list to which the seconds of every later snapshot are appended."""
    seconds: list[float] = []
    take = FragmentTensors.contribute

    def timed(tensors: FragmentTensors, round_number: int) -> ContributionTensors:
        began = time.perf_counter()
        taken = take(tensors, round_number)
        seconds.append(time.perf_counter() - began)
        return taken

    FragmentTensors.contribute = timed  # type: ignore[method-assign, assignment]
    return seconds


def counts(learner: diloco_worker.Learner) -> dict[str, float]:
    """Counts since the process began: CPU seconds, versions applied, contributions merged."""
    assert learner.core is not None
    applied = learner.telemetry.metrics.registry.get_sample_value("diloco_worker_apply_seconds_count") or 0.0
    return {"cpu": time.process_time(), "applied": applied, "merged": learner.core.contributions["merged"]}


# ------------------------------------------------------------ the run


def in_rows(tensors: Sequence[TensorSpec], count: int) -> tuple[TensorSpec, ...]:
    """The same elements in about `count` tensors, each with some of the rows."""
    each = sum(t.num_elements for t in tensors) // count
    found = []
    for tensor in tensors:
        rows, width = tensor.shape
        step = max(1, round(each / width))
        cuts = range(0, rows, step)
        found += [
            tensor._replace(name=f"{tensor.name}.{first}", shape=(min(step, rows - first), width)) for first in cuts
        ]
    return tuple(found)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    tensors = in_rows(tensors_of(int(args.params)), TENSORS)
    parameters = sum(t.num_elements for t in tensors)
    with ExitStack() as stack:
        shards = stack.enter_context(running_shards(args.shards, f"sync.push={args.push}", f"sync.pull={args.pull}"))
        addresses = [shard.address for shard in shards]
        spawn = multiprocessing.get_context("spawn")
        pipe, theirs = spawn.Pipe()
        process = spawn.Process(target=run_loop, args=(addresses, tensors, args.steps, theirs), daemon=True)
        process.start()
        theirs.close()
        stack.callback(process.kill)
        try:
            found = pipe.recv()
        except EOFError:
            sys.exit("the learner ended before it had measured anything")
    per_step = {name: total / len(found["inside_s"]) for name, total in found["counts"].items()}
    rest = [s - t for s, t in zip(found["inside_s"], found["snapshot_s"], strict=True)]
    return {
        "parameters": parameters, "tensors": len(tensors), "shards": args.shards, "push": args.push,
        "pull": args.pull, "steps": len(rest), "step_seconds": STEP_S,
        "step_cost_seconds": spread(found["inside_s"]), "without_snapshot_seconds": spread(rest),
        "snapshot_seconds_median": median(s for s in found["snapshot_s"] if s),
        "copy_seconds_median": median(found["copy_s"]), "addition_seconds": spread(found["addition_s"]),
        "versions_applied_per_step": per_step["applied"], "contributions_merged_per_step": per_step["merged"],
        "learner_cpu_seconds_per_step": per_step["cpu"],
    }  # fmt: skip


def spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[max(0, -(-len(ordered) * 99 // 100) - 1)]
    return {"median": median(ordered), "mean": fmean(ordered), "p99": p99, "max": ordered[-1]}


def good_enough(r: dict[str, Any]) -> bool:
    cost = r["without_snapshot_seconds"]
    flying = min(r["versions_applied_per_step"], r["contributions_merged_per_step"])
    return bool(
        cost["median"] <= MEDIAN_MAX_S and cost["p99"] <= P99_MAX_S and flying >= FLYING_MIN
        and r["snapshot_seconds_median"] <= r["copy_seconds_median"]
    )  # fmt: skip


def show(r: dict[str, Any]) -> None:
    def ms(seconds: dict[str, float]) -> str:
        return ", ".join(f"{name} {1000 * s:.2f} ms" for name, s in seconds.items())

    snapshot_s, copy_s = r["snapshot_seconds_median"], r["copy_seconds_median"]
    for name, said in {
        f"{r['parameters'] / 1e6:.1f} M parameters": f"in {r['tensors']} tensors, {r['shards']} shards, push "
        f"{r['push']}, pull {r['pull']}, {r['steps']} steps of {1000 * STEP_S:.0f} ms",
        "inside learner.step": ms(r["step_cost_seconds"]),
        "  without snapshots": f"{ms(r['without_snapshot_seconds'])}  (wanted: median 1 ms, p99 10 ms)",
        "  snapshots": f"median {1000 * snapshot_s:.2f} ms; a bare copy of a fragment just before "
        f"{1000 * copy_s:.2f} ms: ratio {snapshot_s / copy_s:.2f}  (wanted: 1)",
        "one bare addition": f"of a fragment's size, beside the traffic: {ms(r['addition_seconds'])}",
        "per step": f"{r['versions_applied_per_step']:.2f} versions applied, "
        f"{r['contributions_merged_per_step']:.2f} contributions merged, "
        f"{1000 * r['learner_cpu_seconds_per_step']:.1f} ms of CPU time of the process",
    }.items():  # fmt: skip
        print(f"{name:<22}{said}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=100e6, metavar="N", help="parameters (default: 100e6)")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--push", default="int8", help="encoding of contributions (sync.push)")
    parser.add_argument("--pull", default="bfloat16", help="encoding of versions (sync.pull)")
    parser.add_argument("--steps", type=int, default=300, help="number of steps to measure (default: 300)")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    result = measure(args)
    show(result)
    return 0 if good_enough(result) else 1


if __name__ == "__main__":
    sys.exit(main())
