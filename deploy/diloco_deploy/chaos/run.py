"""The faults injected into a cluster, and how its run ended, as plain values. cluster.py fills them in."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected. Times are monotonic seconds, as in the histories."""

    kind: str
    """Value of a FaultKind."""
    target: str
    began: float
    ended: float
    """When the process was started again or went on, its disk had room again, or the link was back."""


@dataclass
class ChaosRun:
    """One run of a cluster, seen from outside."""

    began: float = 0.0
    """When every worker trained, and the measured time began. Monotonic."""
    ended: float = 0.0
    """When the measured time was over."""
    faults: list[InjectedFault] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    """Processes that ended by themselves or made no progress in the end, in words."""
    healed_s: float | None = None
    """Seconds from the last fault until every worker and every shard had made progress; None: some did not."""
