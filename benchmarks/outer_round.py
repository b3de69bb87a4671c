"""The cost of one outer round of a large model, next to a Gloo all-reduce.

    python benchmarks/outer_round.py                                  # 100 M parameters, 4 learners, 2 shards
    python benchmarks/outer_round.py --push int4 --pull int8
    python benchmarks/outer_round.py --params 1e6 --learners 1 --shards 1 --rounds 3

Real shard and learner processes on loopback. In a round, every learner snapshots, encodes and pushes all fragments, the
shards merge and step, and every learner pulls, decodes and applies. After each round, torch.distributed with Gloo
all-reduces as many float32 parameters among the same learner processes. The first rounds are not counted, because they
fault in memory. Needs Linux, and about 50 bytes of memory per parameter and learner.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import diloco_worker
from diloco_common.process import tune_allocator
from diloco_common.wire.manifest import TensorSpec
from light_learners import Member, running_shards, tensors_of

JOIN_S = 600.0
FP32_BYTES = 4
STEP_TOKENS = 1000
CHANGE = 1e-3
ROUND_S = 300.0
POLL_S = 0.2
"""`poll` returns sooner if something arrives."""
WARM_UP = 5


# ------------------------------------------------------------ a learner process


@dataclass(frozen=True)
class LearnerSpec:
    rank: int
    learners: int
    shards: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    gloo: str
    """URL of Gloo's rendezvous."""


class Weights(nn.Module):
    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for spec in tensors:
            self.register_parameter(spec.name.replace(".", "_"), nn.Parameter(torch.empty(spec.shape).normal_(0, 0.02)))


def run_learner(spec: LearnerSpec, pipe: Connection) -> None:
    """Run the learner process. Its model does not train. It obeys commands from a pipe, and ends with its parent:

    "round"  change the parameters, say "ready"; at "go" take part until every fragment has its next version; say "done"
    "gloo"   say "ready"; at "go" all-reduce as many float32 with Gloo; say "done"
    "usage"  (also allowed before "go") send CPU seconds, memory, and bytes in both directions
    "end"    leave
    """
    tune_allocator()
    torch.set_num_threads(1)
    model = Weights(spec.tensors)
    mean_merge = {t.name.replace(".", "_") for t in spec.tensors if t.rule == "mean"}
    reduced = torch.ones(sum(t.num_elements for t in spec.tensors))
    dist.init_process_group("gloo", init_method=spec.gloo, rank=spec.rank, world_size=spec.learners)
    dist.all_reduce(reduced)  # allocates Gloo's buffers now, so they do not count as ours
    memory = OwnMemory()
    learner = diloco_worker.join(
        spec.shards, model, learner_id=f"learner-{spec.rank}", mean_merge=mean_merge, wait_s=ROUND_S,
        island="alone",  # the process group is only for the all-reduce
    )  # fmt: skip
    with learner:
        pipe.send("joined")
        noise = torch.Generator().manual_seed(spec.rank)
        while (command := pipe.recv()) != "end":
            if command == "usage":
                pipe.send(usage(learner) | {"own_bytes": memory.most})
                continue
            if command == "round":
                change(model, noise)
            pipe.send("ready")
            while pipe.recv() != "go":
                pipe.send(usage(learner))
            memory.begin()
            if command == "round":
                take_round(learner)
                memory.end()
            else:
                dist.all_reduce(reduced)
                reduced.div_(spec.learners)
            pipe.send("done")


class OwnMemory:
    """Peak memory of the process within marked times, beyond what it held before."""

    def __init__(self) -> None:
        self._before = self._rss("VmRSS")
        self.most = 0

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    def end(self) -> None:
        self.most = max(self.most, self._rss("VmHWM") - self._before)

    @staticmethod
    def _rss(field: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(field + ":")[1].split()[0]) * 1024


@torch.no_grad()
def change(model: Weights, noise: torch.Generator) -> None:
    """Stand in for training: move every parameter a little, differently for each learner."""
    for parameter in model.parameters():
        flat = parameter.view(-1)
        pattern = torch.randn(min(flat.numel(), 1 << 16), generator=noise).mul_(CHANGE)
        for start in range(0, flat.numel(), pattern.numel()):
            part = flat[start : start + pattern.numel()]
            part.add_(pattern[: part.numel()])


def take_round(learner: diloco_worker.Learner) -> None:
    """Take the only inner step of a round, then take part until every fragment has its next version."""
    assert learner.core is not None
    fragments = learner.core.fragments.values()
    target = 1 + min(f.version for f in fragments)
    learner.step(STEP_TOKENS)
    deadline = time.monotonic() + ROUND_S
    while any(f.version < target for f in fragments):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no version {target} of every fragment within {ROUND_S:.0f} s")
        learner.poll(POLL_S)


def usage(learner: diloco_worker.Learner) -> dict[str, Any]:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_s": own.ru_utime + own.ru_stime,
        "rss_bytes": own.ru_maxrss * 1024,
        "bytes_up": learner.telemetry.bytes_pushed,
        "bytes_down": learner.telemetry.bytes_pulled,
    }


# ------------------------------------------------------------ all processes


class Learners:
    """The learner processes, in lockstep."""

    def __init__(self, specs: Sequence[LearnerSpec], stack: ExitStack) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for spec in specs:
            ours, theirs = context.Pipe()
            process = context.Process(target=run_learner, args=(spec, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        stack.callback(self._end)
        self._expect("joined")

    def timed(self, command: str, before: Callable[[], None] = lambda: None) -> float:
        """Seconds from the start signal until the last learner is done. Calls `before` just before the signal."""
        self._tell(command)
        self._expect("ready")
        before()
        began = time.perf_counter()
        self._tell("go")
        self._expect("done")
        return time.perf_counter() - began

    def usage(self) -> list[dict[str, Any]]:
        self._tell("usage")
        return [pipe.recv() for pipe in self._pipes]

    def _tell(self, what: str) -> None:
        for pipe in self._pipes:
            pipe.send(what)

    def _expect(self, what: str) -> None:
        for i, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(JOIN_S) or pipe.recv() != what:
                    sys.exit(f"learner {i} did not say {what!r} within {JOIN_S:.0f} s")
            except EOFError:
                sys.exit(f"learner {i} ended before it said {what!r}")

    def _end(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with suppress(OSError):
                pipe.send("end")
            process.join(10.0)
            if process.is_alive():
                process.kill()


class Usage:
    """CPU seconds and bytes of all processes, summed over the rounds that count."""

    def __init__(self, learners: Learners, shards: Sequence[Member]) -> None:
        self.learners, self._shards = learners, shards
        self.learner_cpu_s = self.shard_cpu_s = 0.0
        self.bytes_up = self.bytes_down = 0

    @property
    def cpu_s(self) -> float:
        return self.learner_cpu_s + self.shard_cpu_s

    def in_round(self, *, count: bool) -> float:
        """Take a round, and return its seconds. Its usage counts, unless it is a warm-up."""
        before: list[dict[str, Any]] = []
        shards_before: list[float] = []

        def look() -> None:
            shards_before.extend(shard.cpu_s() for shard in self._shards)
            before.extend(self.learners.usage())

        if not count:
            return self.learners.timed("round")
        seconds = self.learners.timed("round", look)
        for now, then in zip(self.learners.usage(), before, strict=True):
            self.learner_cpu_s += now["cpu_s"] - then["cpu_s"]
            self.bytes_up += now["bytes_up"] - then["bytes_up"]
            self.bytes_down += now["bytes_down"] - then["bytes_down"]
        self.shard_cpu_s += sum(shard.cpu_s() for shard in self._shards) - sum(shards_before)
        return seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    tensors = tensors_of(int(args.params))
    parameters = sum(t.num_elements for t in tensors)
    # A round is one inner step, so that all fragments are due at once. No heartbeats come between the reports.
    settings = [
        f"sync.fragments={args.fragments}", "sync.sync_every=1", "sync.quorum=all",
        f"sync.push={args.push}", f"sync.pull={args.pull}", f"shard.count={args.shards}",
        "lease.lease_s=900", "lease.heartbeat_s=300",
    ]  # fmt: skip
    with ExitStack() as stack:
        shards = stack.enter_context(running_shards(args.shards, *settings))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        gloo = f"file://{folder}/gloo"
        addresses = tuple(shard.address for shard in shards)
        specs = [LearnerSpec(i, args.learners, addresses, tensors, gloo) for i in range(args.learners)]
        usage = Usage(Learners(specs, stack), shards)
        usage.learners.timed("round")
        taken: list[tuple[float, float]] = []
        """Seconds of each round, and of the all-reduce after it."""
        for i in range(1 - WARM_UP, args.rounds):
            taken.append((usage.in_round(count=i >= 0), usage.learners.timed("gloo")))
            which = f"round {i + 1} of {args.rounds}" if i >= 0 else "warming up"
            print(f"{which}: {taken[-1][0]:.2f} s, {taken[-1][1]:.2f} s", file=sys.stderr, flush=True)
        rss = [shard.rss_bytes("VmHWM") for shard in shards]
        ended = usage.learners.usage()
    ours_s, gloo_s = zip(*taken[-args.rounds :], strict=True)
    per = parameters * args.learners * args.rounds
    bytes_up, bytes_down = usage.bytes_up / per, usage.bytes_down / per
    return {
        "parameters": parameters, "learners": args.learners, "shards": args.shards, "fragments": args.fragments,
        "push": args.push, "pull": args.pull, "seconds": ours_s, "gloo_seconds": gloo_s,
        "ratio_to_gloo": median(o / g for o, g in zip(ours_s, gloo_s, strict=True)),
        "bytes_up_per_param": bytes_up, "bytes_down_per_param": bytes_down,
        "share_of_data_parallel_per_step": (bytes_up + bytes_down) / args.fragments / (2 * FP32_BYTES),
        "learner_cpu_seconds": usage.learner_cpu_s / args.rounds / args.learners,
        "shard_cpu_seconds": usage.shard_cpu_s / args.rounds / args.shards, "cpu_seconds": usage.cpu_s / args.rounds,
        "learner_rss_bytes": max(u["rss_bytes"] for u in ended), "shard_rss_bytes": max(rss),
        "learner_bytes_per_param": max(u["own_bytes"] for u in ended) / parameters,
    }  # fmt: skip


def show(r: dict[str, Any]) -> None:
    up, down = r["bytes_up_per_param"], r["bytes_down_per_param"]
    lines = [
        ("a round", spread(r["seconds"])),
        ("Gloo all-reduce", spread(r["gloo_seconds"])),
        ("ratio", f"{r['ratio_to_gloo']:.2f}  (median of the ratios of neighboring rounds)"),
        ("bytes", f"{up:.2f} up + {down:.2f} down = {up + down:.2f} per parameter and learner;"),
        ("", f"per step at H = {r['fragments']} {100 * r['share_of_data_parallel_per_step']:.1f} % of float32 "
         "data-parallel"),
        ("CPU seconds", f"{r['learner_cpu_seconds']:.2f} a learner, {r['shard_cpu_seconds']:.2f} a shard, "
         f"{r['cpu_seconds']:.2f} together"),
        ("peak RSS", f"{r['learner_rss_bytes'] / 1e6:.0f} MB a learner, {r['shard_rss_bytes'] / 1e6:.0f} MB a shard;"),
        ("", f"a learner has {r['learner_bytes_per_param']:.1f} beyond model, idle process and benchmark"),
    ]  # fmt: skip
    print(f"{r['parameters'] / 1e6:.1f} M parameters, {r['learners']} learners, {r['shards']} shards,",
          f"{r['fragments']} fragments, push {r['push']}, pull {r['pull']}")  # fmt: skip
    for name, words in lines:
        print(f"{name:<17}{words}")


def spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} s  (from {min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} rounds)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=100e6, metavar="N", help="parameters (default: 100e6)")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--push", default="int8", help="encoding of contributions (sync.push)")
    parser.add_argument("--pull", default="bfloat16", help="encoding of versions (sync.pull)")
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    show(measure(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
