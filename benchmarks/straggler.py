"""The cost of one slow worker for the others when K = 1: real processes, with and without a slow worker.

    python benchmarks/straggler.py                  # two runs of 4 workers: about 75 s

Every inner step of the tiny model sleeps for most of its time. So workers on the same few cores do not slow each other
down; only synchronization could. In the first run, all steps sleep for 50 ms. In the second, the steps of one worker
sleep for 250 ms. The benchmark compares the steps per second of the three others. It also shows which share of the slow
worker's tokens was merged, as a mean over the fragments.

Exits with 1 if the others lose 5 % or more, or if nothing of the slow worker is merged.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

from light_learners import Member, running, running_shard

LOSS_MAX = 0.05
SLOW = "slow"
FAST = ("fast-0", "fast-1", "fast-2")
START_S = 60.0
FRAGMENTS = 4
SETTINGS = (
    "model.layers=1", "model.heads=2", "model.width=32", "model.context=32", "train.batch=4", "worker.threads=1",
    f"sync.fragments={FRAGMENTS}", "sync.sync_every=8", "sync.quorum=1",
)  # fmt: skip


def run(delays_s: dict[str, float], seconds: float) -> dict[str, Any]:
    """Run workers with these sleeps for `seconds`. Returns steps per second, tokens and merged tokens of each."""
    with ExitStack() as stack:
        shard = stack.enter_context(running_shard(*SETTINGS))
        workers = {
            name: stack.enter_context(
                running(
                    "diloco_demo", *SETTINGS, f"worker.shards={shard.address}", f"worker.learner_id={name}",
                    f"worker.step_min_s={delay_s}",
                )
            )
            for name, delay_s in delays_s.items()
        }  # fmt: skip
        wait_until_all_merge(shard, set(workers))
        begun = {name: (worker.status()["inner_step"], time.monotonic()) for name, worker in workers.items()}
        time.sleep(seconds)
        steps_per_s = {}
        for name, worker in workers.items():
            steps, at = begun[name]
            steps_per_s[name] = (worker.status()["inner_step"] - steps) / (time.monotonic() - at)
        said = {name: worker.status() for name, worker in workers.items()}
        learners = {learner["id"]: learner for learner in shard.status()["learners"]}
        return {
            "steps_per_s": steps_per_s,
            "tokens": {name: learner["tokens"] for name, learner in learners.items()},
            "tokens_merged": {name: learner["tokens_merged"] / FRAGMENTS for name, learner in learners.items()},
            "stall_share": {name: s["sync_stall_s"] / s["uptime_s"] for name, s in said.items()},
        }


def wait_until_all_merge(shard: Member, names: set[str]) -> None:
    deadline = time.monotonic() + START_S
    while {learner["id"] for learner in shard.status()["learners"] if learner["merged"]} != names:
        if time.monotonic() > deadline:
            sys.exit("not every worker contributes")
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what one slow worker costs the others.")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured in each run")
    parser.add_argument("--step-ms", type=float, default=50.0, help="sleep in every inner step")
    parser.add_argument("--factor", type=float, default=5.0, help="how much longer the slow one sleeps")
    args = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = "1"
    step_s = args.step_ms / 1000
    alike = run(dict.fromkeys((*FAST, SLOW), step_s), args.seconds)
    one_slow = run({**dict.fromkeys(FAST, step_s), SLOW: step_s * args.factor}, args.seconds)
    before, after = (sum(found["steps_per_s"][name] for name in FAST) for found in (alike, one_slow))
    lost = 1 - after / before
    arrived = one_slow["tokens_merged"][SLOW] / one_slow["tokens"][SLOW]
    print(f"steps per second      {'all alike':>10}  {f'one {args.factor:g}x slower':>14}")
    for name in (*FAST, SLOW):
        print(f"{name:<20}  {alike['steps_per_s'][name]:10.2f}  {one_slow['steps_per_s'][name]:14.2f}")
    print(f"the others lose       {lost:.1%} (must be below {LOSS_MAX:.0%})")
    print(f"held by learner.step  {max(one_slow['stall_share'].values()):.1%} of the time, at most")
    merged, trained = one_slow["tokens_merged"][SLOW], one_slow["tokens"][SLOW]
    print(f"tokens of {SLOW}        {merged:.0f} merged of {trained} trained ({arrived:.0%})")
    return 0 if lost < LOSS_MAX and arrived > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
