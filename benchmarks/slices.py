"""How long a shard's core blocks the event loop when it opens all rounds at once: CPU time per tick.

    python benchmarks/slices.py --learners 1024 --fragments 1024

No bytes, no network: every learner reports H steps, and the next ticks open a round of every fragment.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from statistics import median

import torch

from diloco_common.codec import encode_payload
from diloco_common.process import tune_allocator
from diloco_common.settings import Settings, ShardSettings, SyncSettings
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_common.wire.messages import PROTOCOL, JoinRequest, Progress
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.fragment import Restored
from diloco_server.core.record import Record
from diloco_server.core.shard import Shard

H = 24


def shard_with(learners: int, fragments: int) -> Shard:
    specs = [TensorSpec(f"w{i:04d}", (1,)) for i in range(fragments)]
    sync, limits = SyncSettings(fragments=fragments, sync_every=H), ShardSettings(max_learners=4096)
    shard = Shard(Settings(sync=sync, shard=limits), 2)
    values = Values(torch.ones(1), [])
    published = Published(encode_payload(values.theta, "float32"))
    records = [Record(i, 1, 5, {}, {}, 0) for i in range(fragments)]
    shard.versions.restore(cut(specs, fragments, 1), [Restored(record, values, published, False) for record in records])
    for i in range(learners):
        member = shard.join(f"learner-{i:04d}", JoinRequest(PROTOCOL, f"process {i}", tuple(specs)), 0.0)
        shard.progress(member, Progress(0, 0, None, 1.0), 0.5)
    shard.tick(0.6)
    return shard


def slices(shard: Shard, now: float) -> Iterator[float]:
    """Milliseconds of each tick that opens rounds."""
    open_rounds = -1
    while shard.open_rounds > open_rounds:
        open_rounds, began = shard.open_rounds, time.thread_time()
        shard.tick(now)
        yield 1e3 * (time.thread_time() - began)
        shard.take_effects()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=1000)
    parser.add_argument("--fragments", type=int, default=64)
    args = parser.parse_args()
    tune_allocator()
    gc.collect()
    gc.freeze()  # as a shard does
    shard = shard_with(args.learners, args.fragments)
    for member in shard.membership.live():
        shard.progress(member, Progress(H, 100 * H, None, 1.0), H + 0.5)
    *opening, idle = slices(shard, H + 0.5)
    print(
        f"{shard.open_rounds} rounds opened for {args.learners} learners in {sum(opening):.0f} ms of CPU and "
        f"{len(opening)} ticks: {median(opening):.1f} ms in the median, {max(opening):.1f} at most; idle {idle:.1f}"
    )


if __name__ == "__main__":
    main()
