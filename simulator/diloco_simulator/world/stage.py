"""What the processes of a schedule share: time, network, histories, the calls that they make to the cluster, and the
tiny model that learners train, whose values count tokens.

Training on one token adds `PATTERN` to the parameters: small whole numbers that differ between neighbors. So the
values show what was trained, and float32 is exact for all tokens of a schedule. Metrics and logs are silent here,
except for errors that the product only logs: a schedule fails if such an error has no cause.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diloco_common.wire.manifest import Fragment
from diloco_simulator.options import Options
from diloco_simulator.verify.histories import MemoryHistory
from diloco_simulator.world.network import Network, Path
from diloco_simulator.world.process import SimulatedProcess, Timeline
from diloco_worker.core.momentum import Companion, Momenta
from diloco_worker.core.replica import Replica

SHAPES = {"body": (31, 2), "head": (8, 2), "limbs": (31, 2), "norm": (3,), "trunk": (31, 2)}
"""Each tensor is too small to be watched for undone versions: changes by whole numbers often look like undone ones."""
AVERAGED = ("head",)
"""Parameters that are merged by a plain mean."""
COMPANION = "head"
"""The companion, in schedules that have one. It is trained like the parameters, and its values stay predictable: steps
do not make it decay, and its second moment does not limit it."""
NUM_ELEMENTS = sum(math.prod(shape) for shape in SHAPES.values())
PATTERN = torch.arange(NUM_ELEMENTS).remainder_(3).add_(1).float()


class Counting(nn.Module):
    """Parameters that are views into one flat tensor, so that a step is one operation."""

    def __init__(self, flat: Tensor, *, has_buffer: bool = False) -> None:
        """Every parameter begins with its part of `flat`, float32 [NUM_ELEMENTS]."""
        super().__init__()
        if has_buffer:  # the mean of several buffers says nothing about tokens, so its values are not checked
            self.register_buffer("seen", torch.zeros(2))
        self.flat = flat.clone()
        self.trained = torch.zeros(NUM_ELEMENTS)
        """What training has added so far. Versions that are applied do not change it."""
        offset = 0
        for name, shape in SHAPES.items():
            size = int(torch.Size(shape).numel())
            self.register_parameter(name, nn.Parameter(self.flat[offset : offset + size].view(shape)))
            offset += size

    def train_on(self, tokens: int) -> None:
        self.flat.add_(PATTERN, alpha=tokens)
        self.trained.add_(PATTERN, alpha=tokens)


class TornReplica(Replica):
    """A replica whose snapshots may go wrong."""

    def __init__(self, model: Counting, meanwhile: Callable[[Tensor], None], *, has_companion: bool = False) -> None:
        """`meanwhile` is called with every snapshot."""
        super().__init__(model, AVERAGED)
        if has_companion:
            self.specs = [spec._replace(kind="momentum") if spec.name == COMPANION else spec for spec in self.specs]
            values = self.parameters.tensors[COMPANION]
            self.of_kind["momentum"] = Momenta(
                {COMPANION: Companion("Adam", values, torch.full_like(values, torch.inf))}
            )
        self._meanwhile = meanwhile

    def progress(self, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
        super().progress(fragment, anchor, out)
        self._meanwhile(out)


class _Flat:
    """Views any flat tensor as the model's fragments."""

    def __init__(self) -> None:
        self._model = Counting(torch.zeros(NUM_ELEMENTS))
        self._replica = Replica(self._model, AVERAGED)

    def part(self, flat: Tensor, fragment: Fragment) -> Tensor:
        self._model.flat.copy_(flat)
        out = torch.empty(fragment.num_elements)
        self._replica.parameters.read(fragment, out)  # also for fragments of other kinds
        return out


_FLAT = _Flat()


def part_of(flat: Tensor, fragment: Fragment) -> Tensor:
    """The elements of a fragment, from values of the whole model: float32 [num_elements]."""
    return _FLAT.part(flat, fragment)


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
        """Counts of events, for the report on a run."""
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
        """A shard is about to serve what it read from its disk."""

    @abstractmethod
    def crash_shard(self, index: int, *, noticed: bool, back_after_s: float, at_await: bool = False) -> None:
        """End a shard, and start it again later."""


class Chronicle(MemoryHistory):
    """The history of one process. The stage follows it while it is written."""

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
