"""What all connections of one learner share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diloco_common.ports import Transport, World
from diloco_common.wire.manifest import TensorSpec, Tie
from diloco_common.wire.messages import FrozenTensor
from diloco_worker.core.connection import Caller
from diloco_worker.shell.codec_thread import CodecThread
from diloco_worker.shell.council import Council, Inbox
from diloco_worker.shell.telemetry import LearnerTelemetry


@dataclass(frozen=True)
class ConnectionContext:
    """What all connections of a learner share."""

    caller: Caller
    tensors: tuple[TensorSpec, ...]
    """Of the model, as Join describes it."""
    dial: Callable[[str], Transport]
    """The way to the shard at an address. Nothing is sent before the first call."""
    world: World
    council: Council
    codec: CodecThread
    telemetry: LearnerTelemetry
    frozen: tuple[FrozenTensor, ...] = ()
    """What must be the same in all learners, as Join declares it."""
    ties: tuple[Tie, ...] = ()
    """Further names of tied parameters."""
    index: int | None = None
    """The number that this learner had in an earlier process."""
    site: str = ""
    """Where it is; empty: nowhere that a mirror could be."""

    @property
    def inbox(self) -> Inbox:
        """Of the training thread."""
        return self.council.inbox
