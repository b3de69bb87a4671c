"""A run that somebody else's program starts, whichever: its settings, in which a lot happens in a second, and what its
processes have written into their histories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

import waiting
from diloco_simulator.verify.histories import Line

TINY: dict[str, object] = {
    "model.layers": 1, "model.heads": 2, "model.width": 32, "model.context": 32, "train.batch": 4,
    "worker.step_min_s": 0.05, "worker.threads": 1, "worker.device": "cpu", "worker.checkpoint_every_s": 2,
    "sync.fragments": 4, "sync.sync_every": 8, "lease.lease_s": 3, "lease.heartbeat_s": 0.5,
}  # fmt: skip
SHARDS, WORKERS = ("shard-0", "shard-1"), ("worker-0", "worker-1")


def as_environment(settings: Mapping[str, object]) -> dict[str, str]:
    """DILOCO_SECTION__KEY for each setting."""
    return {f"DILOCO_{name.upper().replace('.', '__')}": str(value) for name, value in settings.items()}


class Watched(ABC):
    """A run in a folder that all of its processes see."""

    folder: Path
    deadline_s = 300.0

    @abstractmethod
    def lines(self, name: str, *what: str) -> list[Line]:
        """What a process wrote into its history, of these kinds, in all its lives."""

    @abstractmethod
    def said(self) -> str:
        """All logs, for a test that failed."""

    def until(self, condition: Callable[[], object], what: str, every_s: float = 0.2) -> None:
        try:
            waiting.until(condition, what, self.deadline_s, every_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def born(self, name: str) -> int:
        return len(self.lines(name, "born"))

    def wait_for_merges_of_all(self) -> None:
        """Each shard merges something of each worker, from now on."""
        before = {shard: len(self.lines(shard, "merging")) for shard in SHARDS}

        def merged(shard: str) -> set[str]:
            new = self.lines(shard, "merging")[before[shard] :]
            return {contribution["learner"] for line in new for contribution in line["contributions"]}

        for shard in SHARDS:
            self.until(lambda shard=shard: merged(shard) == set(WORKERS), f"merges of both workers at {shard}")
