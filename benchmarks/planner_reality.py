"""Compares a real local cluster with a simulated one: tokens, rounds, evictions, late contributions, bytes.

Each learner is a process whose steps follow the clock, some slower than others. A plan, drawn once, says when learners
are killed and when another process, which has already imported torch, replaces each. The planner simulates the same
plan, with the measured median time of joining, and up to the time at which the real run was read: a lease may have
ended just before. A row has the real figures, and in brackets the simulation's error.

    python benchmarks/planner_reality.py                       # the figures of docs/planner.md; 9 minutes
    python benchmarks/planner_reality.py --learners 4 --seeds 1 --seconds 30
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from diloco_common.codec import num_payload_bytes
from diloco_common.settings import LeaseSettings, Settings, SyncSettings
from diloco_planner.chips import ChipTimeline, Failures, Island, island_timeline
from diloco_planner.plans import LearnerPlan, ShardPlan
from diloco_planner.world import PlannedWorld
from diloco_worker.shell.codec_thread import SEED_ENCODING
from light_learners import running_shard

STEP_S, NOISE, TOKENS, FRAGMENTS, PARAMS = 0.1, 0.1, 100, 6, 12_000
SLOWER = (1.0, 1.1, 1.3, 1.6)
"""Factors on the step time, learner by learner."""
FAILS = Failures(mtbi_s=1e12, preempt_every_s=45.0, preempt_for_s=9.0, notice_s=0.0)
IMPORT_S = 120.0
LEASE = LeaseSettings(lease_s=3.0, heartbeat_s=0.5)
WORKER = """
import random, sys, time
import torch
import diloco_worker

name, shard, step_s, noise, fragments, params, tokens, seed = sys.argv[1:]
step_s, noise, draw = float(step_s), float(noise), random.Random(seed)
values = [torch.zeros(int(params) // int(fragments)) for _ in range(int(fragments))]
model = torch.nn.ParameterList(map(torch.nn.Parameter, values))
print("imported", flush=True)
sys.stdin.readline()
began = time.monotonic()
with diloco_worker.join(shard, model, learner_id=name, log=None) as learner:
    ends = time.monotonic()
    print("joined", ends - began, flush=True)
    while True:
        with torch.no_grad():
            torch._foreach_add_([*model.parameters()], 1e-4)
        ends += step_s * max(0.05, 1 + noise * draw.gauss(0, 1))
        time.sleep(max(0.0, ends - time.monotonic()))
        learner.step(tokens=int(tokens))
        print(learner.inner_step, flush=True)
"""


@dataclass(frozen=True)
class Result:
    tokens_trained: float
    tokens_merged: float
    rounds: float
    evictions: float
    late_share: float
    pushed_mb: float
    pulled_mb: float


def plans(learners: int, seconds: float, seed: int) -> list[LearnerPlan]:
    found = []
    for i in range(learners):
        chance = random.Random(f"{seed} {i}")
        line = island_timeline(Island(1), FAILS, seconds, chance)
        found.append(LearnerPlan(
            f"learner-{i}", Island(1), step_s=STEP_S * SLOWER[i % len(SLOWER)], noise=NOISE, tokens_per_step=TOKENS,
            line=line,
        ))  # fmt: skip
    return found


def joining_takes(plan: LearnerPlan, joining_s: float) -> LearnerPlan:
    """`plan`, but each process starts training this much later, or never, if it is killed before."""
    assert plan.line is not None
    joined = [joining_s, *(back + joining_s for _, back, _ in plan.line.away)]
    gone = [*(gone for gone, _, _ in plan.line.away), plan.line.until]
    lives = [(begun, ended) for begun, ended in zip(joined, gone, strict=True) if begun < ended]
    begins_s = lives[0][0]
    line = ChipTimeline(plan.line.until - begins_s)
    for (_, begun), (ended, _) in pairwise([*lives, (math.inf, math.inf)]):
        line.change(begun - begins_s, 0.0)
        line.change(ended - begins_s, 1.0)
        line.away.append((begun - begins_s, ended - begins_s, False))
    line.freeze()
    return replace(plan, begins_s=begins_s, line=line)


def settings(grace: float | str) -> Settings:
    return Settings(sync=SyncSettings(fragments=FRAGMENTS, sync_every=24, grace=grace), lease=LEASE)  # type: ignore[arg-type]


def simulated(
    learners: Sequence[LearnerPlan], until: float, seed: int, grace: float | str, joining_s: float
) -> Result:  # fmt: skip
    plans = [joining_takes(plan, joining_s) for plan in learners]
    world = PlannedWorld(settings(grace), PARAMS, plans, ShardPlan(), until, seed, decided=FRAGMENTS)
    found = world.run()
    sent, taken = (1e3 * sum(one[way] for one in found.learners) for way in ("sent_gb", "taken_gb"))
    seeded = 1e-6 * num_payload_bytes(SEED_ENCODING, PARAMS)  # the simulation starts from version 0
    return Result(
        found.tokens_trained, found.tokens_share_merged * found.tokens_trained, found.rounds, found.evictions,
        found.late_share, sent + seeded, taken,
    )  # fmt: skip


class Process:
    """The process of a learner, which waits for `go`."""

    def __init__(self, plan: LearnerPlan, shard: str, folder: Path, life: int) -> None:
        self._steps, self._errors = folder / f"{plan.name}.{life}", folder / f"{plan.name}.{life}.err"
        words = [plan.name, shard, plan.step_s, NOISE, FRAGMENTS, PARAMS, TOKENS, f"{plan.name} {life}"]
        with self._steps.open("w") as out, self._errors.open("w") as errors:
            self._child = subprocess.Popen(
                [sys.executable, "-c", WORKER, *map(str, words)], stdin=subprocess.PIPE, stdout=out, stderr=errors
            )  # fmt: skip

    def wait_imported(self) -> None:
        ends = time.monotonic() + IMPORT_S
        while "imported" not in self._steps.read_text() and self._child.poll() is None:
            if time.monotonic() > ends:
                sys.exit("a process did not begin in time; look for a machine that is too busy, and try again")
            time.sleep(0.02)

    def go(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(b"\n")
        self._child.stdin.flush()

    def kill(self) -> None:
        """Kill it, as planned or at the end. If it has ended by itself, the run did not follow the plan."""
        if self._child.returncode is None and (code := self._child.poll()) is not None:
            print(f"{self._steps.name} ended by itself with {code}: {self._errors.read_text()[-500:]}", file=sys.stderr)
        self._child.kill()
        self._child.wait()

    @property
    def steps(self) -> int:
        return sum(line.isdigit() for line in self._lines())

    @property
    def joined_s(self) -> list[float]:
        """Empty if it did not join."""
        return [float(line.split()[1]) for line in self._lines() if line.startswith("joined")]

    def _lines(self) -> list[str]:
        return self._steps.read_text().split("\n")[:-1]


def real(learners: Sequence[LearnerPlan], seconds: float, grace: float | str) -> tuple[Result, float, float]:
    """Run the real cluster. Returns its totals, the median time of joining, and when it was read, in seconds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shard = stack.enter_context(running_shard(
            f"sync.fragments={FRAGMENTS}", "sync.sync_every=24", f"sync.grace={grace}",
            f"lease.lease_s={LEASE.lease_s}", f"lease.heartbeat_s={LEASE.heartbeat_s}",
        ))  # fmt: skip
        lives = {
            plan.name: [Process(plan, shard.address, folder, life) for life in range(1 + len(plan.line.away))]
            for plan in learners if plan.line is not None
        }  # fmt: skip
        everyone = [process for of_one in lives.values() for process in of_one]
        for process in everyone:
            stack.callback(process.kill)
        for process in everyone:
            process.wait_imported()
        began = time.monotonic()
        for when, what in script(learners, lives, seconds):
            time.sleep(max(0.0, began + when - time.monotonic()))
            what()
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        status, looked_s = shard.status(), time.monotonic() - began
        steps = sum(process.steps for process in everyone)
        joined_s = median(took for process in everyone for took in process.joined_s)
        return Result(
            steps * TOKENS, status["tokens_merged"], status["rounds"], status["evictions"],
            status["late"] / max(1.0, status["late"] + status["rounds"] * status["participants_mean"]),
            1e-6 * status["bytes_pushed"], 1e-6 * status["bytes_pulled"],
        ), joined_s, looked_s  # fmt: skip


def script(learners: Sequence[LearnerPlan], lives: dict[str, list[Process]], seconds: float) -> list[tuple[float, Any]]:

    def events() -> Iterator[tuple[float, Any]]:
        for plan in learners:
            assert plan.line is not None
            mine = lives[plan.name]
            yield 0.0, mine[0].go
            for life, (begun, ended, _) in enumerate(plan.line.away):
                yield begun, mine[life].kill
                yield ended, mine[life + 1].go

    return sorted((event for event in events() if event[0] < seconds), key=lambda event: event[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--learners", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--grace", default="adaptive", help="a round stays open for so many seconds, or adaptive")
    asked = parser.parse_args()
    grace = asked.grace if asked.grace == "adaptive" else float(asked.grace)
    print(
        "| learners | seed | tokens trained | merged | rounds | evictions | late | MB up | MB down | joining |\n"
        + "| --- " * 10
        + "|"
    )
    for count in asked.learners:
        for seed in range(asked.seeds):
            learners = plans(count, asked.seconds, seed)
            there, joining_s, looked_s = real(learners, asked.seconds, grace)
            here = simulated(learners, looked_s, seed, grace, joining_s)
            cells = [
                f"{there.tokens_trained:,.0f} ({here.tokens_trained / there.tokens_trained - 1:+.1%})",
                f"{there.tokens_merged:,.0f} ({here.tokens_merged / there.tokens_merged - 1:+.1%})",
                f"{there.rounds:,} ({here.rounds / there.rounds - 1:+.1%})",
                f"{there.evictions} ({here.evictions})", f"{there.late_share:.1%} ({here.late_share:.1%})",
                f"{there.pushed_mb:.2f} ({here.pushed_mb / there.pushed_mb - 1:+.1%})",
                f"{there.pulled_mb:.2f} ({here.pulled_mb / there.pulled_mb - 1:+.1%})", f"{joining_s:.2f} s",
            ]  # fmt: skip
            print(f"| {count} | {seed} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
