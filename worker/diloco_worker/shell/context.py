"""Everything that the connections of one learner share."""

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
    caller: Caller
    tensors: tuple[TensorSpec, ...]
    dial: Callable[[str], Transport]
    """Returns the transport to the shard at an address. Nothing is sent before the first call."""
    world: World
    council: Council
    codec: CodecThread
    telemetry: LearnerTelemetry
    frozen: tuple[FrozenTensor, ...] = ()
    """Tensors that must be equal in all learners, for Join."""
    ties: tuple[Tie, ...] = ()
    index: int | None = None
    """This learner's number in an earlier process."""
    site: str = ""
    """The learner's place, for mirrors; empty: none."""

    @property
    def inbox(self) -> Inbox:
        return self.council.inbox
