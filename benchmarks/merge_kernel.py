"""How close merging comes to the speed of memory: one closed round of one large fragment, in one thread.

    python benchmarks/merge_kernel.py                  # 4 contributions as int8, the version as bfloat16
    python benchmarks/merge_kernel.py --pull int8

A merge must touch these bytes per parameter: each contribution, read once; theta and the momentum, read and written;
the encoded version, written (for a change, the version before is read, too). The yardstick is copying memory of a
similar size, measured in turn.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from ceilings import Memory
from diloco_common.allocator import tune_allocator
from diloco_common.codec import encode_payload
from diloco_common.manifest import TensorSpec, cut
from diloco_common.settings import OuterSettings
from diloco_server.core import arithmetic
from diloco_server.core.merge import piece_norms
from diloco_server.core.outer_rules import make_outer_optimizer
from diloco_server.core.round import Contribution

TENSORS, ROWS, COLUMNS = 8, 2048, 1024
REPEATS = 9


def measure_merge(learners: int, push: str, pull: str) -> dict[str, float]:
    """Speed of merging, outer step and encoding, and its share of the copying speed, as medians.

    `merge_step_...` are the same for merging and outer step alone, which do not touch the version's bytes.
    """
    [fragment] = cut([TensorSpec(f"layers.{i}.weight", (ROWS, COLUMNS)) for i in range(TENSORS)], 1, 1).fragments
    memory = Memory()
    contributions = []
    for i in range(learners):
        payload = encode_payload(torch.randn(fragment.num_elements).mul_(1e-3), push)
        norms = piece_norms(payload, fragment.pieces)
        contributions.append(Contribution(f"learner-{i}", i + 1, 0, 1, 0, 1000, 10, payload, norms))
    optimizer = make_outer_optimizer(OuterSettings())
    making = arithmetic.Making("rda", optimizer)
    theta = torch.randn(fragment.num_elements)
    values = arithmetic.Values(theta, optimizer.new_buffers(theta.numel()))
    published = arithmetic.publish(values, pull)
    seconds, step_seconds, copying = [], [], []
    for repeat in range(REPEATS + 1):
        began = time.perf_counter()
        arithmetic.step(values, fragment, contributions, outer_step=repeat + 1, making=making)
        stepped = time.perf_counter()
        published = arithmetic.publish(values, pull, published)
        if repeat:
            seconds.append(time.perf_counter() - began)
            step_seconds.append(stepped - began)
            copying.append(memory.bytes_per_s())
    step_touched = sum(c.payload.header.num_bytes for c in contributions)
    step_touched += 2 * (values.theta.nbytes + sum(b.nbytes for b in values.buffers))
    touched = step_touched + published.values.header.num_bytes
    if published.change is not None:  # a change also reads the version before
        touched += published.change.header.num_bytes + published.values.header.num_bytes
    speeds, step_speeds = [touched / s for s in seconds], [step_touched / s for s in step_seconds]
    return {
        "merge_copying_bytes_per_s": median(copying),
        "merge_bytes_per_param": touched / fragment.num_elements,
        "merge_bytes_per_s": median(speeds),
        "merge_fraction_of_memory_bandwidth": median(a / b for a, b in zip(speeds, copying, strict=True)),
        "merge_step_bytes_per_param": step_touched / fragment.num_elements,
        "merge_step_fraction_of_memory_bandwidth": median(a / b for a, b in zip(step_speeds, copying, strict=True)),
    }


def show(r: dict[str, float]) -> None:
    step = r["merge_step_bytes_per_param"]
    encoded = r["merge_bytes_per_param"] - step
    fraction, step_fraction = r["merge_fraction_of_memory_bandwidth"], r["merge_step_fraction_of_memory_bandwidth"]
    print(f"merge + outer step      {step_fraction:.2f} of copying speed, for {step:.1f} bytes")
    print("                        per parameter: contributions read once, theta and momentum read and written")
    print(f"the same with encoding  {fraction:.2f} of copying speed, for {encoded:.1f} more: the version")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--push", default="int8", help="encoding of contributions (sync.push)")
    parser.add_argument("--pull", default="bfloat16", help="encoding of versions (sync.pull)")
    args = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(1)
    show(measure_merge(args.learners, args.push, args.pull))


if __name__ == "__main__":
    main()
