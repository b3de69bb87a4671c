"""The cost of one outer round of a large model, next to the machine's ceilings and to a Gloo all-reduce.

    python benchmarks/outer_round.py                                  # 100 M parameters, 4 learners, 2 shards
    python benchmarks/outer_round.py --push int4 --pull int8
    python benchmarks/outer_round.py --tls                            # what mutual TLS costs: each round twice
    python benchmarks/outer_round.py --params 1e6 --learners 1 --shards 1 --rounds 3 --json out.json

Real shard and learner processes on loopback. In a round, every learner snapshots, encodes and pushes all fragments, the
shards merge and step, and every learner pulls, decodes and applies. In the same run, in turn with the rounds, four
yardsticks are measured: torch.distributed with Gloo all-reduces as many float32 parameters among the same learner
processes; bare gRPC (bare_wire.py) sends the same bytes; a bare round (bare_round.py) does all that with the same
kernels and nothing else; and ceilings.py measures the machine. The first rounds are not counted, because they fault in
memory. Needs Linux, and about 50 bytes of memory per parameter and learner.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bare_round import BareRound
from bare_wire import BareWire, WireSpec
from ceilings import Memory, loopback_bytes_per_s
from diloco_common.allocator import tune_allocator
from diloco_common.identity import subject_of
from diloco_common.manifest import TensorSpec
from diloco_deploy.certs.authority import make_authority, open_authority
from diloco_deploy.polling import IN_PLAINTEXT, Asker
from light_learners import ShardProcess, running_shard, running_shards, tensors_of
from merge_kernel import measure_merge
from outer_round_learner import LearnerSpec, run_learner

JOIN_S = 600.0
FP32_BYTES = 4
WARM_UP = 5


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
    """CPU seconds and bytes of all processes, summed over the rounds of `during_round`."""

    def __init__(self, learners: Learners, shards: Sequence[ShardProcess], asker: Asker = IN_PLAINTEXT) -> None:
        """`asker`: whom shards show their metrics."""
        self.learners, self._shards, self._asker = learners, shards, asker
        self.rounds = 0
        self.learner_cpu_s = self.shard_cpu_s = 0.0
        self.bytes_up = self.bytes_down = 0
        self.phases: dict[str, float] = {}

    @property
    def cpu_s(self) -> float:
        """Of all processes together."""
        return self.learner_cpu_s + self.shard_cpu_s

    def during_round(self) -> float:
        """Take a round, and return its seconds."""
        before: list[dict[str, Any]] = []
        shards_before: list[tuple[float, dict[str, float]]] = []

        def look() -> None:
            shards_before.extend((compute_seconds(s, self._asker), s.cpu_s())[::-1] for s in self._shards)
            before.extend(self.learners.usage())

        seconds = self.learners.timed("round", look)
        after, shards_after = (
            self.learners.usage(),
            [(s.cpu_s(), compute_seconds(s, self._asker)) for s in self._shards],
        )
        self.rounds += 1
        for a, b in zip(after, before, strict=True):
            self.learner_cpu_s += a["cpu_s"] - b["cpu_s"]
            self.bytes_up += a["bytes_up"] - b["bytes_up"]
            self.bytes_down += a["bytes_down"] - b["bytes_down"]
            self._add(a["phases_cpu_s"], b["phases_cpu_s"])
        for (cpu, phases), (cpu_before, phases_before) in zip(shards_after, shards_before, strict=True):
            self.shard_cpu_s += cpu - cpu_before
            self._add(phases, phases_before)
        return seconds

    def _add(self, after: dict[str, float], before: dict[str, float]) -> None:
        for phase, seconds in after.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds - before.get(phase, 0.0)


def usage_over_tls(
    args: argparse.Namespace, settings: Sequence[str], tensors: Sequence[TensorSpec], stack: ExitStack
) -> Usage:
    """The same cluster once more, with certificates. Its rounds are taken in turn with those in plaintext."""
    folder, now = Path(stack.enter_context(tempfile.TemporaryDirectory())), datetime.now(UTC)
    make_authority(folder, "local", now)
    authority = open_authority(folder)

    def issued(who: str) -> Path:
        return authority.issue(subject_of("local", who), now)[0]

    shards = [
        stack.enter_context(running_shard(*settings, f"shard.index={i}", f"security.tls={issued(f'shard/{i}')}"))
        for i in range(args.shards)
    ]
    addresses = tuple(shard.address for shard in shards)
    specs = [
        LearnerSpec(i, args.learners, addresses, tuple(tensors), "", issued(f"learner/learner-{i}"))
        for i in range(args.learners)
    ]
    return Usage(Learners(specs, stack), shards, Asker(issued("observer/benchmark")))


def compute_seconds(shard: ShardProcess, asker: Asker) -> dict[str, float]:
    """CPU seconds of the shard's compute thread by phase, from its metrics."""
    _, body = asker.get(shard.http, 60.0, "/metrics")
    lines = r'^diloco_shard_compute_seconds_total\{phase="(\w+)"\} (\S+)$'
    found = re.findall(lines, body.decode(), re.MULTILINE)
    return {phase: float(value) for phase, value in found}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything. Returns the figures for `--json`."""
    tensors = tensors_of(int(args.params))
    parameters = sum(t.num_elements for t in tensors)
    # A round is one inner step, so that all fragments are due at once. Shards do not believe steps that follow too fast
    # upon a report (`core/trust/trail.py`), so there are no heartbeats: each would have the next step wait for
    # another one.
    settings = [
        f"sync.fragments={args.fragments}", "sync.sync_every=1", "sync.quorum=all",
        f"sync.push={args.push}", f"sync.pull={args.pull}", f"shard.count={args.shards}",
        "lease.lease_s=900", "lease.heartbeat_s=300", "guard.norm_factor=1e9",
    ]  # fmt: skip
    with ExitStack() as stack:
        shards = stack.enter_context(running_shards(args.shards, *settings))
        idle = [shard.rss_bytes() for shard in shards]
        gloo = "" if args.no_gloo else f"127.0.0.1:{free_port()}"
        addresses = tuple(shard.address for shard in shards)
        learners = Learners(
            [LearnerSpec(i, args.learners, addresses, tensors, gloo) for i in range(args.learners)],
            stack,
        )
        usage = Usage(learners, shards)
        memory = Memory()
        ours_s, gloo_s, memory_bps, loopback_bps = [], [], [], []
        bare_s: list[tuple[float, float]] = []  # seconds, and CPU seconds
        least_s: list[tuple[float, float]] = []
        learners.timed("round")
        encrypted = usage_over_tls(args, settings, tensors, stack) if args.tls else None
        tls_s: list[float] = []
        spec = WireSpec(args.learners, args.shards, args.fragments, parameters, args.push, args.pull)
        bare, least = BareWire(spec, stack), BareRound(spec, stack)
        for i in range(1 - WARM_UP, args.rounds):
            seconds = usage.during_round() if i >= 0 else learners.timed("round")
            if encrypted is not None:
                tls_s.append(encrypted.during_round() if i >= 0 else encrypted.learners.timed("round"))
            peer_s = 0.0 if args.no_gloo else learners.timed("gloo")
            if i >= 0:
                ours_s.append(seconds)
                gloo_s.append(peer_s)
                bare_s.append(bare.round())
                least_s.append(least.round())
                memory_bps.append(memory.bytes_per_s())
                loopback_bps.append(loopback_bytes_per_s())
            which = f"round {i + 1} of {args.rounds}" if i >= 0 else "warming up"
            say(f"{which}: {seconds:.2f} s" + (f", Gloo {peer_s:.2f} s" if peer_s else ""))
        rss = [shard.rss_bytes("VmHWM") for shard in shards]
        ended = learners.usage()
    tls_s = tls_s[-args.rounds :]
    merge = measure_merge(args.learners, args.push, args.pull)
    per = parameters * args.learners * args.rounds
    phases = {phase: seconds / args.rounds for phase, seconds in usage.phases.items()}
    phases["wire"] = (usage.learner_cpu_s + usage.shard_cpu_s) / args.rounds - sum(phases.values())
    bytes_up, bytes_down = usage.bytes_up / per, usage.bytes_down / per
    contributions = [round(bytes_up * parameters * args.learners / args.shards)] * args.shards
    return {
        "parameters": parameters, "learners": args.learners, "shards": args.shards, "fragments": args.fragments,
        "push": args.push, "pull": args.pull, "rounds": args.rounds,
        "seconds": ours_s, "seconds_median": median(ours_s), "gloo_seconds": gloo_s,
        "gloo_seconds_median": median(gloo_s) or None,
        "ratio_to_gloo": None if args.no_gloo else median(o / g for o, g in zip(ours_s, gloo_s, strict=True)),
        "tls_seconds": tls_s,
        "ratio_of_tls": median(t / o for t, o in zip(tls_s, ours_s, strict=True)) if tls_s else None,
        "cpu_ratio_of_tls": encrypted.cpu_s / usage.cpu_s if encrypted is not None else None,
        **against("bare_grpc", ours_s, bare_s), **against("bare_round", ours_s, least_s),
        "bytes_up_per_param": bytes_up, "bytes_down_per_param": bytes_down,
        "share_of_data_parallel_per_step": (bytes_up + bytes_down) / args.fragments / (2 * FP32_BYTES),
        "learner_cpu_seconds": usage.learner_cpu_s / args.rounds / args.learners,
        "shard_cpu_seconds": usage.shard_cpu_s / args.rounds / args.shards,
        "learner_rss_bytes": [u["rss_bytes"] for u in ended],
        "learner_bytes_per_param": max(u["own_bytes"] for u in ended) / parameters,
        "shard_rss_bytes": rss, "shard_idle_rss_bytes": idle,
        "shard_contribution_bytes": contributions,
        "shard_bytes_per_param": max(
            (peak - rest - held) * args.shards / parameters
            for peak, rest, held in zip(rss, idle, contributions, strict=True)
        ),
        "phases_cpu_seconds": phases,
        "memcpy_bytes_per_s": median(memory_bps), "loopback_bytes_per_s": median(loopback_bps),
        **merge,
    }  # fmt: skip


def against(name: str, ours_s: Sequence[float], theirs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """What took seconds and CPU seconds in turn with our rounds."""
    seconds = [s for s, _ in theirs]
    return {
        f"{name}_seconds": seconds, f"{name}_seconds_median": median(seconds),
        f"{name}_cpu_seconds": median(cpu_s for _, cpu_s in theirs),
        f"ratio_to_{name}": median(o / s for o, s in zip(ours_s, seconds, strict=True)),
    }  # fmt: skip


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


WHAT = {
    "snapshot": "learner: snapshot, beside the training",
    "encode": "learner: pseudo-gradient, error feedback, encode",
    "inspect": "shard:   norms of contributions",
    "merge": "shard:   merge, outer step, encode the version",
    "decode": "learner: decode",
    "apply": "learner: apply, in learner.step",
    "wire": "both:    send, receive, checksums, the rest",
}


def show(r: dict[str, Any]) -> None:
    up, down = r["bytes_up_per_param"], r["bytes_down_per_param"]
    share = 100 * r["share_of_data_parallel_per_step"]
    line(
        f"{r['parameters'] / 1e6:.1f} M parameters, {r['learners']} learners, {r['shards']} shards,",
        f"{r['fragments']} fragments, push {r['push']}, pull {r['pull']}",
    )
    line(f"a round          {spread(r['seconds'])}")
    if r["ratio_of_tls"] is not None:
        line(f"over mutual TLS  {spread(r['tls_seconds'])}")
        line(f"ratio            {r['ratio_of_tls']:.2f}  (median of the ratios of neighbouring rounds);")
        line(f"                 in CPU seconds of all processes {r['cpu_ratio_of_tls']:.2f}")
    if r["ratio_to_gloo"] is not None:
        line(f"Gloo all-reduce  {spread(r['gloo_seconds'])}")
        line(f"ratio            {r['ratio_to_gloo']:.2f}  (median of the ratios of neighbouring rounds)")
    line(f"bare gRPC        {spread(r['bare_grpc_seconds'])}: the same bytes and nothing else;")
    line(f"                 a round takes {r['ratio_to_bare_grpc']:.2f} times that")
    line(f"a bare round     {spread(r['bare_round_seconds'])}: the same kernels, too;")
    line(f"                 a round takes {r['ratio_to_bare_round']:.2f} times that")
    line(f"bytes            {up:.2f} up + {down:.2f} down = {up + down:.2f} per parameter and learner;")
    line(f"                 per step at H = {r['fragments']} {share:.1f} % of float32 data-parallel")
    line(f"CPU seconds      {r['learner_cpu_seconds']:.2f} a learner, {r['shard_cpu_seconds']:.2f} a shard")
    learner_mb, shard_mb = max(r["learner_rss_bytes"]) / 1e6, max(r["shard_rss_bytes"]) / 1e6
    line(
        f"peak RSS         {learner_mb:.0f} MB a learner, {shard_mb:.0f} MB",
        f"a shard: {r['shard_bytes_per_param']:.1f} bytes per parameter that",
    )
    line("                 it owns, without open contributions and idle memory;")
    line(f"                 a learner has {r['learner_bytes_per_param']:.1f} beyond model, idle process and benchmark")
    line(
        f"ceilings         copying memory {r['memcpy_bytes_per_s'] / 1e9:.0f} GB/s (read + written),",
        f"loopback socket {r['loopback_bytes_per_s'] / 1e9:.1f} GB/s",
    )
    copying = r["merge_copying_bytes_per_s"] / 1e9
    line(
        f"merge            of {r['learners']} contributions, on one thread alone,",
        f"against copying memory at {copying:.0f} GB/s:",
    )
    line(
        f"                 {r['merge_step_fraction_of_memory_bandwidth']:.2f} of that with the outer step",
        f"({r['merge_step_bytes_per_param']:.1f} bytes per parameter must be touched),",
    )
    line(
        f"                 {r['merge_fraction_of_memory_bandwidth']:.2f} with encoding the version, too",
        f"({r['merge_bytes_per_param']:.1f} bytes)",
    )
    line("CPU seconds of a round, all processes together:")
    total = sum(r["phases_cpu_seconds"].values())
    for phase, what in WHAT.items():
        seconds = r["phases_cpu_seconds"].get(phase, 0.0)
        line(f"  {what:<50} {seconds:6.2f} s  {100 * seconds / total:3.0f} %")
    line(f"    of which bare gRPC takes                         {r['bare_grpc_cpu_seconds']:7.2f} s")
    cores = os.cpu_count() or 1
    line(f"    bare gRPC and the same arithmetic, all at once   {r['bare_round_cpu_seconds']:7.2f} s")
    line(f"  {'together':<50} {total:6.2f} s, so on {cores} cores at least {total / cores:.2f} s")


def line(*parts: str) -> None:
    print(*parts)


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
    parser.add_argument("--no-gloo", action="store_true", help="without the peer: saves its memory and time")
    parser.add_argument("--tls", action="store_true", help="each round over mutual TLS, too: twice the memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    result = measure(args)
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
