"""The load that one core of a shard can serve: CPU time over learners, fragments, parameters, and with more shards.

    python benchmarks/growth.py                                # all cases: minutes
    python benchmarks/growth.py --only learners,shards

Shards are real processes; learners are light ones (light_learners.py) in this process. In a round, every learner
reports H inner steps, so all fragments are due. All learners contribute int8 to all fragments, and pull every version
as bfloat16. The kernel reports the CPU seconds of a shard. Over all cases with one shard, least squares gives:

    CPU seconds = a per version + b per contribution + c per parameter + d per byte received or sent

So one core serves 1 / b small contributions per second, or 1 / d bytes per second of large ones. `cores` is the load of
the busiest shard: its event loop is one thread, so near 1 it is saturated. Needs Linux, and about 3 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from diloco_common.wire.manifest import cut
from light_learners import Accepted, LightLearner, noise_of, running_shards, tensors_of

SYNC_EVERY = 24


@dataclass(frozen=True)
class Cost:
    learners: int
    fragments: int
    parameters: int
    shards: int = 1
    seconds: float = 0.0
    """Seconds of a round, including the learners' work on the same cores."""
    cpu_s: list[float] = field(default_factory=list)
    moved_bytes: float = 0.0
    """Bytes that all shards received and sent."""

    @property
    def contributions(self) -> int:
        return self.learners * self.fragments

    @property
    def terms(self) -> list[float]:
        return [self.fragments, self.contributions, self.parameters, self.moved_bytes]


# "mixed" varies several numbers at once, to separate bytes, contributions and parameters.
SWEEPS = {
    "learners": [Cost(n, 8, 1_000_000) for n in (1, 4, 8, 16, 32, 64, 128, 256)],
    "fragments": [Cost(4, n, 8_000_000) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)],
    "parameters": [Cost(4, 24, int(n * 1e6)) for n in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)],
    "shards": [Cost(n, 8, 1_000_000, shards) for n in (16, 64, 256) for shards in (2, 4, 8)],
    "bytes": [Cost(n, 8, 8_000_000) for n in (8, 32, 64)],
    "mixed": [Cost(32, 8, 4_000_000), Cost(16, 8, 8_000_000), Cost(2, 128, 16_000_000), Cost(1, 8, 32_000_000)],
}


async def measure(case: Cost, rounds: int, at_least_s: float) -> Cost:
    """Warm up for one round, then measure at least `rounds`. Each learner is one light learner per shard."""
    manifest = cut(tensors_of(case.parameters), case.fragments, case.shards)
    contributions = noise_of(manifest.fragments, 0.001, "int8")
    settings = (
        f"sync.fragments={case.fragments}", f"sync.sync_every={SYNC_EVERY}", "sync.quorum=all", "sync.push=int8",
        "sync.pull=bfloat16",
        f"shard.max_pushes={4 * case.learners + 64}", "lease.lease_s=300", "lease.heartbeat_s=1",
    )  # fmt: skip
    with running_shards(case.shards, *settings) as shards:
        learners = [
            LightLearner(f"learner-{i}", shard, manifest, manifest.owned_by(index), contributions, Accepted())
            for i in range(case.learners)
            for index, shard in enumerate(shards)
        ]
        for learner in learners:
            await learner.join()
        for learner in learners[: case.shards]:
            for fragment in learner.fragments:  # one after the other, to save memory in this process
                await learner.seed(noise_of([fragment], 0.02, "float32"))
        await asyncio.gather(*(learner.pulled(0) for learner in learners))

        async def take(version: int) -> None:
            await asyncio.gather(*(learner.step(version * SYNC_EVERY) for learner in learners))
            await asyncio.gather(*(learner.contribute_to(len(learner.fragments)) for learner in learners))
            await asyncio.gather(*(learner.pulled(version) for learner in learners))

        def used() -> list[float]:
            moved = sum(learner.bytes_pushed + learner.bytes_pulled for learner in learners)
            return [time.monotonic(), moved, *(shard.cpu_s() for shard in shards)]

        await take(1)
        before, done = used(), 0
        while done < rounds or used()[0] - before[0] < at_least_s:
            done += 1
            await take(1 + done)
        seconds, moved, *cpu_s = ((now - then) / done for now, then in zip(used(), before, strict=True))
        await asyncio.gather(*(learner.leave() for learner in learners))
    fragments, parameters = len(manifest.fragments), manifest.num_elements
    return Cost(case.learners, fragments, parameters, case.shards, seconds, cpu_s, moved)


def law(costs: Sequence[Cost]) -> list[float]:
    """Costs per version, contribution, parameter and byte, from cases with one shard.

    Least squares of relative errors. Negative costs are removed, the most negative first.
    """
    weighted = np.array([cost.terms for cost in costs], dtype=float) / np.array([[cost.cpu_s[0]] for cost in costs])
    kept = list(range(weighted.shape[1]))
    while True:
        scale = weighted[:, kept].max(axis=0)
        found = np.linalg.lstsq(weighted[:, kept] / scale, np.ones(len(costs)), rcond=None)[0] / scale
        if found.min() >= 0 or len(kept) == 1:
            break
        del kept[int(np.argmin(found * scale))]
    result = np.zeros(weighted.shape[1])
    result[kept] = np.maximum(found, 0)
    return [float(one) for one in result]


def line_of(cost: Cost) -> str:
    cpu_s = sum(cost.cpu_s)
    return (
        f"{cost.learners:>8} {cost.fragments:>9} {cost.parameters / 1e6:>8.2f} {cost.shards:>6} {cost.seconds:>8.3f} "
        f"{max(cost.cpu_s):>11.3f} {cost.contributions / cpu_s:>22.0f} {cost.moved_bytes / cpu_s / 1e6:>6.0f} "
        f"{max(cost.cpu_s) / cost.seconds:>5.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SWEEPS), help=",".join(SWEEPS))
    parser.add_argument("--rounds", type=int, default=3, help="rounds to measure in each case, after one to warm up")
    parser.add_argument("--seconds", type=float, default=1.0, help="take more rounds until this much time is measured")
    args = parser.parse_args()
    if unknown := set(args.only) - set(SWEEPS):
        parser.error(f"no such sweep: {', '.join(sorted(unknown))}; there are {', '.join(SWEEPS)}")
    torch.set_num_threads(1)
    cases = [case for name in args.only for case in SWEEPS[name]]
    print("learners fragments M params shards  s/round shard CPU s per core: contributions/s   MB/s cores")

    async def all_costs() -> list[Cost]:  # all in one event loop, because gRPC cannot change its loop
        costs = []
        for case in cases:
            costs.append(await measure(case, args.rounds, args.seconds))
            print(line_of(costs[-1]), flush=True)
        return costs

    single = [cost for cost in asyncio.run(all_costs()) if cost.shards == 1]
    if len(single) < 4:  # too few to tell the four costs apart
        return
    version_s, contribution_s, parameter_s, byte_s = law(single)
    print(f"\n{1000 * contribution_s:.2f} ms per contribution with its pull, {1e9 * byte_s:.2f} s per GB, "
          f"{1e9 * parameter_s:.2f} s per 1000 M parameters, {1000 * version_s:.2f} ms per version")  # fmt: skip
    if contribution_s and byte_s:
        print(f"So one core serves at most {1 / contribution_s:.0f} contributions per second, and at most "
              f"{1e-6 / byte_s:.0f} MB per second.")  # fmt: skip


if __name__ == "__main__":
    main()
