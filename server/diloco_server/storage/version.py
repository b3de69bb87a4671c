"""The stored state of one fragment at one version, and the run it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diloco_common.codec import Payload
from diloco_common.settings import Settings
from diloco_server.core.arithmetic import Values
from diloco_server.core.record import Record


@dataclass(frozen=True)
class StoredVersion:
    """Everything a shard needs to go on from a version, bit for bit."""

    record: Record
    values: Values
    anchor: Payload | None
    """The anchor of the learners, if it does not follow from the values: in a run that sends changes."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Theta and the buffers of the outer optimizer [num_elements], by their names in a file."""
        return {"theta": self.values.theta} | {f"outer.{i}": b for i, b in enumerate(self.values.buffers)}


@dataclass(frozen=True)
class Origin:
    """The run and shard that wrote a version. A shard refuses files of another origin."""

    run: str
    shard_index: int
    num_shards: int
    num_fragments: int
    """P of the settings. The manifest has fewer fragments if the model has few pieces."""
    optimizer: str
    """Name of the outer optimizer. Its state is kept."""
    pull: str
    """`sync.pull`. It decides which bytes learners hold of a version. The only field that may change."""

    @classmethod
    def of(cls, settings: Settings) -> Origin:
        return cls(
            settings.run.id, settings.shard.index, settings.shard.count, settings.sync.fragments,
            settings.outer.optimizer, settings.sync.pull,
        )  # fmt: skip
