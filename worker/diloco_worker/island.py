"""One rank of an island: a learner whose ranks train one model in lockstep, as DDP and FSDP2 do.

Every rank has a whole learner: core, step boundary, codec thread, connections. They differ in what they hold of the
model, and in who speaks: the leader, rank 0, joins and attends; the others push and pull under its lease. How they stay
in step: core/island_log.py. docs/islands.md is the design.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from diloco_common.errors import ConfigError, UnsupportedModel
from diloco_common.ports import Transport, World
from diloco_common.wire.manifest import model_digest
from diloco_common.wire.messages import FrozenTensor, Progress
from diloco_worker.boundary import Start
from diloco_worker.codec_thread import CodecThread
from diloco_worker.context import ConnectionContext
from diloco_worker.core import parts
from diloco_worker.core.connection import Caller
from diloco_worker.core.island_log import IslandLog
from diloco_worker.core.parts import Holding, Seat, Sharing
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.inbox import Inbox
from diloco_worker.island_boundary import IslandBoundary
from diloco_worker.island_connections import IslandConnections
from diloco_worker.island_exchange import Exchange, IslandGroup
from diloco_worker.learner import Background, Learner
from diloco_worker.state import LearnerState
from diloco_worker.telemetry import LearnerTelemetry
from diloco_worker.watch import ModelWatch


def form_island(island: Any, name: str, saved: LearnerState | None) -> tuple[IslandGroup, str]:
    """The group of its ranks, and the leader's name for all of them. Raises ConfigError.

    `saved`: the state that this rank goes on from. Ranks that begin with other counts would decide in other ways.
    """
    group = IslandGroup(island)
    states = group.all_of(hashlib.sha256(repr(saved).encode()).hexdigest())
    if different := [rank for rank, state in enumerate(states) if state != states[0]]:
        raise ConfigError(
            f"state=: ranks {different} of the island bring another state than rank 0, or only some ranks bring one; "
            "load the same checkpoint in all"
        )
    return group, group.agree(name)


def make_replica(model: SharedSet, mean_merge: Collection[str] | None, group: IslandGroup) -> Replica:
    """This rank's part of the model. Raises UnsupportedModel, and ConfigError if ranks bring different models."""

    def located(tensor: Tensor) -> tuple[Holding, Sharing]:
        ranks = sorted(tensor.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
        if ranks != sorted(group.ranks):
            raise UnsupportedModel(f"the model's device mesh has ranks {ranks}, the island {sorted(group.ranks)}")
        try:
            return parts.located(tensor)
        except ValueError as error:
            raise UnsupportedModel(f"a parameter {error}; {parts.SUPPORTED}") from None

    replica = Replica(model, mean_merge, seat=Seat(group.rank, group.size, located))
    digests = group.all_of(model_digest(replica.specs))
    if different := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ConfigError(f"ranks {different} of the island bring another model than rank 0; build the same one in all")
    return replica


def make_island_learner(
    replica: Replica, addresses: Sequence[str], caller: Caller, dial: Callable[[str], Transport], world: World,
    background: Background, telemetry: LearnerTelemetry, start: Start, exchange: Exchange, size: int,
    goodbye: Callable[[], Awaitable[None]], frozen: Sequence[FrozenTensor] = (), *, index: int | None = None,
    watch: ModelWatch | None = None, agree: Callable[[str], str] | None = None,
) -> Learner:  # fmt: skip
    """The learner of one rank, in some world. As `make_learner`; nothing is dialed before `start`.

    Args:
        exchange: to the other ranks.
        size: ranks of the island.
        goodbye: waits until all ranks leave.
        agree: what the leader says, at all ranks; all wait for it. Needed by `Learner.finish`.
    """
    telemetry.is_island = True
    telemetry.born(start.inner_step, start.tokens)
    inbox, log = Inbox(), IslandLog(caller.rank, size)
    codec = CodecThread(replica.device, world, telemetry)
    context = ConnectionContext(
        caller,
        tuple(replica.specs),
        dial,
        world,
        inbox,
        codec,
        telemetry,
        is_island=True,
        frozen=tuple(frozen),
        ties=replica.ties,
        index=index,
    )
    connections = IslandConnections(addresses, Progress(start.inner_step, start.tokens), context, goodbye)
    boundary = IslandBoundary(replica, addresses, inbox, lambda: connections.pulse, world, start, log, exchange)
    telemetry.figures = boundary.figures
    return Learner(boundary, connections, background, context, watch, agree)
