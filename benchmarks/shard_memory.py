"""The memory of a shard: a real server process, learners that only push and pull, peak RSS from the kernel.

    python benchmarks/shard_memory.py                  # 100 M parameters, 4 learners, 24 fragments: about a minute
    python benchmarks/shard_memory.py --push int4 --pull int8

The learners seed all fragments at once, as real learners do when they start together. Then a round of every fragment
opens. All learners but one contribute to all rounds, then the last one does. So the shard holds the maximum.

    (peak RSS - idle RSS - peak bytes of accepted, unmerged contributions) / parameters  <  11 bytes

Exits with 1 if this does not hold. Needs Linux, and about 2.5 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import torch

from diloco_common.wire.manifest import Manifest, cut
from light_learners import Accepted, LightLearner, Member, noise_of, running_shard, tensors_of

BYTES_PER_PARAMETER_MAX = 11.0
MB = 1e6


async def load(shard: Member, manifest: Manifest, learners: int, rounds: int, push: str) -> Accepted:
    accepted = Accepted()
    contributions = noise_of(manifest.fragments, 0.001, push)
    all_learners = [
        LightLearner(f"learner-{i}", shard, manifest, manifest.fragments, contributions, accepted)
        for i in range(learners)
    ]
    for learner in all_learners:
        await learner.join()
    seeds = noise_of(manifest.fragments, 0.02, "float32")
    await asyncio.gather(*(learner.seed(seeds) for learner in all_learners))
    seeds.clear()
    for version in range(rounds + 1):
        for learner in all_learners:
            await learner.pulled(version)
        if version == rounds:
            break
        for learner in all_learners:
            await learner.step((version + 1) * len(manifest.fragments))
        *most, last = all_learners
        await asyncio.gather(*(learner.contribute_to(len(manifest.fragments)) for learner in most))
        await last.contribute_to(len(manifest.fragments))
    await asyncio.gather(*(learner.leave() for learner in all_learners))
    return accepted


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the memory of a shard.")
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every fragment")
    parser.add_argument("--push", default="int8", help="encoding of contributions (sync.push)")
    parser.add_argument("--pull", default="bfloat16", help="encoding of versions (sync.pull)")
    args = parser.parse_args()
    torch.set_num_threads(1)

    manifest = cut(tensors_of(args.parameters), args.fragments, 1)
    parameters = sum(fragment.num_elements for fragment in manifest.fragments)
    every = f"sync.sync_every={args.fragments}"
    # The learners share an event loop that also encodes, so a lease must outlast the encoding.
    lease = ("lease.lease_s=300", "lease.heartbeat_s=1")
    encodings = (f"sync.push={args.push}", f"sync.pull={args.pull}")
    with running_shard(f"sync.fragments={args.fragments}", every, "sync.quorum=all", *encodings, *lease) as shard:
        idle = shard.rss_bytes()
        accepted = asyncio.run(load(shard, manifest, args.learners, args.rounds, args.push))
        peak = shard.rss_bytes("VmHWM")
    own = (peak - idle - accepted.most) / parameters
    print(f"{parameters / 1e6:.1f} M parameters, {args.learners} learners, {args.fragments} fragments,",
          f"push {args.push}, pull {args.pull}")  # fmt: skip
    for name, num_bytes in (("idle shard", idle), ("peak", peak), ("contributions of open rounds", accepted.most)):
        print(f"{name:<30}{num_bytes / MB:8.0f} MB")
    print(f"the rest, per parameter       {own:8.2f} bytes (must be below {BYTES_PER_PARAMETER_MAX:g})")
    return 0 if own < BYTES_PER_PARAMETER_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
