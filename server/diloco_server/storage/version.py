"""What is kept of one fragment at one version, and of the run that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diloco_common.codec import Payload
from diloco_common.settings import Settings
from diloco_server.core.arithmetic import Values
from diloco_server.core.record import Record


@dataclass(frozen=True)
class StoredVersion:
    """All that it takes to go on from a version, bit for bit."""

    record: Record
    values: Values
    anchor: Payload | None
    """What learners hold of this version, where it does not follow from the values: a run that sends changes."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The float32 tensors [num_elements], by the name that they have in a file."""
        return {"theta": self.values.theta} | {f"outer.{i}": b for i, b in enumerate(self.values.buffers)}


@dataclass(frozen=True)
class Origin:
    """Whose versions they are: files of another origin are refused."""

    run: str
    shard_index: int
    num_shards: int
    num_fragments: int
    """P as the settings have it: more than the manifest has, where the model has few pieces."""
    optimizer: str
    """Name of the outer optimizer, whose state is kept."""
    pull: str
    """`sync.pull`: decides which bytes learners hold of a version. The only one that may change."""

    @classmethod
    def of(cls, settings: Settings) -> Origin:
        return cls(
            settings.run.id, settings.shard.index, settings.shard.count, settings.sync.fragments,
            settings.outer.optimizer, settings.sync.pull,
        )  # fmt: skip
