"""The shared state of a schedule's processes: time, network, histories; and the calls that they make to the cluster.

Metrics and logs are silent here, except for errors that the product only logs: a schedule fails on those without a
cause.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diloco_simulator.options import Options
from diloco_simulator.verify.histories import MemoryHistory
from diloco_simulator.world.network import Network, Path
from diloco_simulator.world.process import SimulatedProcess, Timeline


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint of a learner process, as a training loop saves it."""

    flat: Tensor
    inner_step: int
    tokens: int


class Stage(ABC):
    def __init__(self, options: Options) -> None:
        self.options = options
        self.timeline = Timeline()
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """Counts of events, for the report of a run."""
        self.network = Network(self.timeline, options, self.faults, self.said)
        self.learner_ids = tuple(f"w{i}" for i in range(options.learners))
        self.starts: Counter[str] = Counter()
        """Starts of shards and learners, by name."""
        self.checkpoints: defaultdict[str, list[Checkpoint]] = defaultdict(list)
        """Learner -> checkpoints of its processes, oldest first."""
        self.chronicles: list[Chronicle] = []
        self.processes: list[SimulatedProcess] = []
        """Every process ever started."""
        self.events: list[tuple[Any, ...]] = []

    def note(self, *what: Any) -> None:
        self.events.append((self.timeline.now, *what))

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def history_of(self, name: str) -> Chronicle:
        chronicle = Chronicle(self, name)
        self.chronicles.append(chronicle)
        return chronicle

    def seed_of(self, name: str) -> str:
        """The seed of the next process of this name."""
        return f"{self.options.seed} {name} {self.starts[name]}"

    @abstractmethod
    def heard(self, name: str, what: str, facts: dict[str, Any]) -> None:
        """A process has written a line of its history."""

    @abstractmethod
    def said(self, item: Any, path: Path) -> None:
        """A shard sends something to a learner."""

    @abstractmethod
    def has_model(self, index: int) -> bool:
        """Whether a shard's model can no longer be replaced."""

    @abstractmethod
    def begins(self, index: int) -> None:
        """A shard is about to serve what its disk has returned."""

    @abstractmethod
    def crash_shard(self, index: int, *, noticed: bool, back_after_s: float, at_await: bool = False) -> None:
        """The shard ends, and is started again later."""


class Chronicle(MemoryHistory):
    """The history of one process, followed while it is written."""

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__(lambda: stage.timeline.now)
        self.name = name
        self._stage = stage

    def write(self, what: str, **facts: Any) -> None:
        super().write(what, **facts)
        self._stage.heard(self.name, what, facts)


class StageSilence:
    """Metrics that count nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Accept any call silently."""
        return self


class QuietLog:
    """A log that ignores everything but errors."""

    def __init__(self, name: str, on_error: Callable[[str, dict[str, Any]], None]) -> None:
        self.name = name
        self._on_error = on_error

    def event(self, what: str, **facts: Any) -> None:
        """Ignored."""

    def debug(self, what: str, **facts: Any) -> None:
        """Ignored."""

    def warning(self, what: str, **facts: Any) -> None:
        """Ignored."""

    def error(self, what: str, **facts: Any) -> None:
        self._on_error(what, facts)
