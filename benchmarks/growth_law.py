"""The laws behind the costs of growth.py: least squares with relative weights and no negative costs, also in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Measured(Protocol):
    """The part of growth.Cost that the laws use."""

    @property
    def learners(self) -> int: ...
    @property
    def fragments(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def contributions(self) -> int: ...
    @property
    def moved_bytes(self) -> float: ...
    @property
    def shard_cpu_s(self) -> list[float]: ...
    @property
    def own_bytes(self) -> int: ...


@dataclass(frozen=True)
class CpuLaw:
    """CPU seconds of a shard in a round of all its fragments."""

    per_version_s: float
    per_contribution_s: float
    """To receive, guard and answer a contribution, and to announce the version to its learner and send it."""
    per_parameter_s: float
    """To merge, step and encode, once per round, however many learners contribute."""
    per_byte_s: float
    """To receive or send a byte, and to decode it."""
    worst: float
    """Largest relative distance of a measurement from the law."""
    typical: float
    """Median relative distance."""

    def seconds(self, cost: Measured) -> float:
        return (
            self.per_version_s * cost.fragments
            + self.per_contribution_s * cost.contributions
            + self.per_parameter_s * cost.parameters
            + self.per_byte_s * cost.moved_bytes
        )

    @property
    def contributions_per_s(self) -> float:
        """Contributions, each with its pull, that one core serves where they are so small that only calls cost."""
        return 1 / max(self.per_contribution_s, 1e-9)

    @property
    def bytes_per_s(self) -> float:
        """Bytes that one core receives and sends where contributions are so large that only bytes cost."""
        return 1 / max(self.per_byte_s, 1e-15)

    @property
    def even_bytes(self) -> float:
        """Bytes of a contribution with its pull from which on the bytes cost more than the calls."""
        return self.per_contribution_s / max(self.per_byte_s, 1e-15)

    def words(self) -> str:
        return (
            "CPU of a shard, per round of all its fragments: linear in everything.\n"
            f"  {1000 * self.per_contribution_s:6.2f} ms   per contribution (learners x fragments), with its pull\n"
            f"  {1e9 * self.per_byte_s:6.2f} s    per GB received or sent\n"
            f"  {1e9 * self.per_parameter_s:6.2f} s    per 1000 M parameters, however many contribute\n"
            f"  {1000 * self.per_version_s:6.2f} ms   per version\n"
            f"  So one core serves at most {self.contributions_per_s:.0f} contributions per second, pushed and pulled,"
            f" and at most\n  {self.bytes_per_s / 1e6:.0f} MB per second;"
            f" from {self.even_bytes / 1e6:.1f} MB per contribution on, the bytes cost more than the calls.\n"
            f"  The cases are {self.typical:.0%} from this in the median, {self.worst:.0%} at most."
        )


@dataclass(frozen=True)
class MemoryLaw:
    """Peak resident memory of a shard, without its idle memory and the contributions of its open rounds."""

    per_parameter: float
    """Bytes."""
    per_fragment_parameter: float
    """Bytes per parameter of one fragment, to compute, receive or serve it."""
    per_learner: float
    """Bytes, for connections, streams and data in flight."""
    fixed: float
    """Bytes, for threads, buffers and libraries that an idle shard does not touch."""

    def bytes(self, cost: Measured) -> float:
        fragment = self.per_fragment_parameter * cost.parameters / cost.fragments
        return self.fixed + self.per_parameter * cost.parameters + fragment + self.per_learner * cost.learners

    def words(self) -> str:
        return (
            "Peak memory of a shard: idle + compressed contributions of its open rounds"
            f" + {self.per_parameter:.1f} bytes per parameter\n"
            f"  + {self.per_fragment_parameter:.1f} bytes per parameter of one fragment"
            f" + {self.per_learner / 1e6:.2f} MB per learner + {self.fixed / 1e6:.0f} MB."
        )


def fit_cpu(costs: Sequence[Measured]) -> CpuLaw:
    """Fit cases with one shard."""
    rows = [[c.fragments, c.contributions, c.parameters, c.moved_bytes] for c in costs]
    seconds = np.array([c.shard_cpu_s[0] for c in costs])
    found = _non_negative(np.array(rows, dtype=float), seconds)
    off = np.abs(np.array(rows) @ found / seconds - 1)
    version, contribution, parameter, byte = map(float, found)
    return CpuLaw(version, contribution, parameter, byte, worst=float(off.max()), typical=float(np.median(off)))


def fit_memory(costs: Sequence[Measured]) -> MemoryLaw:
    """Fit cases with one shard."""
    rows = [[c.parameters, c.parameters / c.fragments, c.learners, 1] for c in costs]
    rest = np.array([c.own_bytes for c in costs], dtype=float)
    return MemoryLaw(*map(float, _non_negative(np.array(rows, dtype=float), rest)))


def _non_negative(rows: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of the relative distances. Negative costs are left out, the most negative first."""
    values = np.maximum(values, 1e-9)
    weighted = rows / values[:, None]
    kept = list(range(rows.shape[1]))
    while True:
        scale = weighted[:, kept].max(axis=0)
        found = np.linalg.lstsq(weighted[:, kept] / scale, np.ones(len(values)), rcond=None)[0] / scale
        if found.min() >= 0 or len(kept) == 1:
            break
        del kept[int(np.argmin(found * scale))]
    result = np.zeros(rows.shape[1])
    result[kept] = np.maximum(found, 0)
    return result
