"""The arithmetic of docs/wan.md and docs/performance.md: pure functions of numbers, each with its source.

N  parameters          H  inner steps between two rounds of a fragment (`sync.sync_every`)
P  fragments           L  learners          S  shards          t  seconds per inner step
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

BITS: Mapping[str, float] = MappingProxyType({
    "float32": 32.0, "bfloat16": 16.0, "int8": 8.125, "int4": 4.125,
})  # fmt: skip
"""Bits per parameter of each encoding, with scales and indices (docs/wan.md)."""
VALUES = ("float32", "bfloat16")
"""Encodings that pulls use for values; all others send changes."""

CALLS_PER_S = 450.0
"""Contributions (a push and a pull each) per second and core of a shard (docs/performance.md, growth)."""
BYTES_PER_S = 1.28e9
"""Payload bytes per second that one core of a shard can receive and send (docs/performance.md, growth)."""
MOMENTUM_BYTES: Mapping[str, int] = MappingProxyType({"nesterov": 2, "sgd": 2, "adam": 8})
"""Bytes of state of each outer optimizer, per parameter (docs/version-file.md); 4 is assumed for a user's own."""
LINK_SHARE = 0.5
"""The share of a link, core or disk that the run may use on average. The rest is for bursts and repeats."""


def rate(params: float, bits: float, every: float, step_s: float) -> float:
    """Bits per second of one learner in one direction: N bits / (H t) (docs/wan.md)."""
    return params * bits / (every * step_s)


def every_for_rate(params: float, bits: float, bits_per_s: float, step_s: float, share: float) -> int:
    """The smallest H at which the rate is at most this share of a link: `rate` solved for H."""
    return max(1, math.ceil(params * bits / (share * bits_per_s * step_s)))


def bytes_rate(params: float, push_bits: float, pull_bits: float, learners: int, every: int, step_s: float) -> float:
    """Payload bytes per second that all shards receive and send: L N (push + pull) / 8 / (H t)."""
    return learners * rate(params, push_bits + pull_bits, every, step_s) / 8


def version_bytes(outer: str, pull: str) -> int:
    """Bytes per parameter of a version on disk: theta, momentum, and the anchor of changes (docs/performance.md)."""
    return 4 + MOMENTUM_BYTES.get(outer, 4) + (0 if pull in VALUES else 2)


def companion_bytes(pull: str) -> int:
    """Bytes per parameter of a companion's version on disk: its values, and the anchor of changes."""
    return 4 + (0 if pull in VALUES else 2)


def shard_memory(
    params_owned: float, fragments: int, learners: int, push_bits: float, outer: str, pull: str,
    *, companions: bool = False,
) -> float:  # fmt: skip
    """Peak bytes of a shard: 260 MB + 8 MB + n (10 + ...) + 8.5 n_fragment + 0.62 MB L + contributions.

    n: parameters that it owns. It is 10 bytes with Nesterov and bfloat16 pulls; Adam takes 6 more, and changes or
    float32 pulls take 2 more. At most one contribution per learner and fragment is open: n L push / 8. Companions are
    as many parameters again, without outer state: 8 bytes each, and their contributions. Measured by
    benchmarks/shard_memory.py (docs/performance.md), without companions.
    """
    per_parameter = 10.0 + (version_bytes(outer, pull) - 6) + (2 if pull == "float32" else 0)
    largest = params_owned / max(1, fragments)
    contributions = learners * params_owned * push_bits / 8
    if companions:
        per_parameter += 8.0 + companion_bytes(pull) - 4
        contributions *= 2
    return 260e6 + 8e6 + per_parameter * params_owned + 8.5 * largest + 0.62e6 * learners + contributions


def shard_disk(params_owned: float, largest: float, each: float, checkpoints: int) -> float:
    """Bytes of a data folder: two versions of everything, regular checkpoints, and two files being written.

    `largest`: parameters of the largest fragment; `each`: bytes per parameter of a version (docs/runbook.md,
    DilocoDiskNearlyFull).
    """
    return each * ((2 + checkpoints) * params_owned + 2 * largest)


def disk_rate(params_owned: float, each: float, every: int, step_s: float) -> float:
    """Bytes per second that a shard writes: every fragment once per H steps (docs/performance.md, keeping versions)."""
    return each * params_owned / (every * step_s)
