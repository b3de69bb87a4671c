"""Does the disk limit rounds? Two runs that differ only in `shard.durability`, in turn on one machine.

One run makes every version durable before it announces it ("version", the default). The other announces first, and
writes nothing while it is measured ("interval" of an hour). Learners step at a fixed pace, so the load of the disk is
known. A ratio of one means that the disk costs no time. The disk's own rate is measured first, to show which share of
it was used.

    python benchmarks/disk_rounds.py                        # two minutes
    python benchmarks/disk_rounds.py --step-s 0.02 --folder /a/disk         # a pace that a slow disk cannot keep
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

import diloco_worker
from diloco_common.allocator import tune_allocator
from diloco_server.storage.filesystem import Disk
from light_learners import ShardProcess, running_shard, tensors_of
from outer_round_learner import STEP_TOKENS, LearnerSpec, Weights, change

WAIT_S = 120.0
PROBE_S = 2.0
CHANGES_EVERY = 6
"""Steps between two changes of the parameters. The changes stand for training, and should not be most of the work."""


class DiskRun:
    """A shard with a data folder, and learners that take steps on command."""

    def __init__(self, durability: str, folder: Path, args: argparse.Namespace, stack: ExitStack) -> None:
        self.rates: list[float] = []
        self.shard = stack.enter_context(
            running_shard(
                f"sync.fragments={args.fragments}", f"sync.sync_every={args.fragments}", "sync.quorum=all",
                "lease.lease_s=300", "lease.heartbeat_s=1", "guard.norm_factor=1e9", f"shard.data_dir={folder}",
                f"shard.durability={durability}", "shard.interval_s=3600",
            )
        )  # fmt: skip
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        tensors = tensors_of(int(args.params))
        for rank in range(args.learners):
            spec = LearnerSpec(rank, args.learners, (self.shard.address,), tensors, "")
            ours, theirs = context.Pipe()
            process = context.Process(target=run_learner, args=(spec, args.step_s, theirs), daemon=True)
            process.start()
            stack.callback(process.kill)
            self._pipes.append(ours)

    def take(self, steps: int) -> float:
        """Let every learner take steps at its pace. Returns rounds per second."""
        for pipe in self._pipes:
            pipe.send(steps)
        rates = []
        for pipe in self._pipes:
            if not pipe.poll(WAIT_S):
                sys.exit("a learner does not answer")
            rates.append(pipe.recv())
        return float(median(rates))


def run_learner(spec: LearnerSpec, step_s: float, pipe: Connection) -> None:
    """The learner process: takes the given number of steps, and answers with its rounds per second."""
    tune_allocator()
    torch.set_num_threads(1)
    model, noise = Weights(spec.tensors), torch.Generator().manual_seed(spec.rank)
    with diloco_worker.join(spec.shards, model, learner_id=f"learner-{spec.rank}", wait_s=WAIT_S) as learner:
        assert learner.core is not None
        fragments = learner.core.fragments.values()
        while True:
            steps = pipe.recv()
            before, began = sum(f.version for f in fragments), time.monotonic()
            for i in range(steps):
                if i % CHANGES_EVERY == 0:
                    change(model, noise)
                learner.step(STEP_TOKENS)
                time.sleep(max(0.0, began + (i + 1) * step_s - time.monotonic()))
            pipe.send((sum(f.version for f in fragments) - before) / (time.monotonic() - began))


def disk_bytes_per_s(folder: Path, num_bytes: int) -> float:
    """Measure the disk: write and sync files of a version's size, one after the other."""
    disk, data = Disk(folder), memoryview(os.urandom(num_bytes))
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < PROBE_S:
        file = disk.create("probe")
        file.write(data)
        file.sync()
        file.close()
        disk.sync_names()
        count += 1
    taken = time.perf_counter() - began
    disk.remove("probe")
    return count * num_bytes / taken


def saved(shard: ShardProcess) -> tuple[float, float, float]:
    """Bytes, seconds and number of the versions made durable so far, from the shard's metrics."""
    with urllib.request.urlopen(f"http://{shard.http}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    names = ("diloco_shard_saved_bytes_total", "diloco_shard_save_seconds_sum", "diloco_shard_save_seconds_count")
    num_bytes, seconds, count = (
        sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)) for name in names
    )
    return num_bytes, seconds, count


def measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Measure windows of both runs in turn. Each pair gives a ratio."""
    disk = disk_bytes_per_s(folder / "probe", int(6 * args.params / args.fragments))
    with ExitStack() as stack:
        runs = [DiskRun(name, folder / name, args, stack) for name in ("version", "interval")]
        durable, relaxed = runs
        for run in runs:
            run.take(2 * args.fragments)  # warm-up: seeds, first writes, page faults
        before, seconds = saved(durable.shard), 0.0
        unwritten = saved(relaxed.shard)[2]
        for i in range(args.windows):
            for run in runs if i % 2 else runs[::-1]:
                began = time.monotonic()
                run.rates.append(run.take(args.steps))
                seconds += time.monotonic() - began if run is durable else 0.0
            print(f"window {i + 1}: {durable.rates[-1]:.2f} <-> {relaxed.rates[-1]:.2f}", file=sys.stderr, flush=True)
        num_bytes, save_s, count = (now - then for now, then in zip(saved(durable.shard), before, strict=True))
        assert saved(relaxed.shard)[2] == unwritten, "the run to compare with has written, too"
    return {
        "rounds_per_s_version": median(durable.rates),
        "rounds_per_s_interval": median(relaxed.rates),
        "ratio_median": median(a / b for a, b in zip(durable.rates, relaxed.rates, strict=True)),
        "ratio_min": min(a / b for a, b in zip(durable.rates, relaxed.rates, strict=True)),
        "mb_per_round": num_bytes / count / 1e6,
        "save_s_mean": save_s / count,
        "written_mb_per_s": num_bytes / seconds / 1e6,
        "disk_mb_per_s": disk / 1e6,
        "share_of_disk": num_bytes / seconds / disk,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=24e6, help="parameters (default: 24e6)")
    parser.add_argument("--fragments", type=int, default=24, help="also H, so that one round is due per step")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.2, help="seconds of an inner step")
    parser.add_argument("--steps", type=int, default=36, help="of a window")
    parser.add_argument("--windows", type=int, default=7, help="of each run")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder's")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="disk-rounds-", dir=args.folder))
    try:
        figures = measure(args, folder)
    finally:
        shutil.rmtree(folder)
    for name, value in figures.items():
        print(f"{name:24} {value:,.4g}")
    if args.json:
        result: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}} | figures
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
