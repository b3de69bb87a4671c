"""How near merging is to the speed of memory: one closed round of one large fragment, in this process, one thread.

Bytes that a merge must touch, per parameter: each contribution read once; theta and the momentum read and written; the
encoded version written. Copying memory of a like size, measured in turn, is the yardstick.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from ceilings import Memory
from diloco_common.codec import encode_payload
from diloco_common.manifest import TensorSpec, cut
from diloco_common.settings import OuterSettings
from diloco_server.core import fragment as arithmetic
from diloco_server.core.merge import piece_norms
from diloco_server.core.outer import make_outer_optimizer
from diloco_server.core.rounds import Contribution

TENSORS, ROWS, COLUMNS = 8, 2048, 1024
REPEATS = 9


def measure_merge(learners: int, push: str, pull: str) -> dict[str, float]:
    """Speed of merging, outer step and encoding, and its share of the copying speed; medians."""
    [fragment] = cut([TensorSpec(f"layers.{i}.weight", (ROWS, COLUMNS)) for i in range(TENSORS)], 1, 1).fragments
    memory = Memory()
    contributions = []
    for i in range(learners):
        payload = encode_payload(torch.randn(fragment.num_elements).mul_(1e-3), push)
        norms = piece_norms(payload, fragment.pieces)
        contributions.append(Contribution(f"learner-{i}", i + 1, 0, 1, 0, 1000, 10, payload, norms))
    optimizer = make_outer_optimizer(OuterSettings())
    theta = torch.randn(fragment.num_elements)
    values = arithmetic.Values(theta, [torch.zeros_like(theta) for _ in range(optimizer.num_buffers)])
    published = arithmetic.publish(values, pull)
    seconds, copying = [], []
    for repeat in range(REPEATS + 1):
        began = time.perf_counter()
        arithmetic.step(values, fragment, contributions, outer_step=repeat + 1, rule="rda", optimizer=optimizer)
        published = arithmetic.publish(values, pull, published)
        if repeat:
            seconds.append(time.perf_counter() - began)
            copying.append(memory.bytes_per_s())
    touched = sum(c.payload.header.num_bytes for c in contributions) + published.values.header.num_bytes
    if published.change is not None:  # and what it is a change from
        touched += published.change.header.num_bytes + published.values.header.num_bytes
    touched += 2 * 4 * fragment.num_elements * (1 + optimizer.num_buffers)
    speeds = [touched / s for s in seconds]
    return {
        "merge_bytes_per_param": touched / fragment.num_elements,
        "merge_bytes_per_s": median(speeds),
        "merge_fraction_of_memory_bandwidth": median(a / b for a, b in zip(speeds, copying, strict=True)),
    }
