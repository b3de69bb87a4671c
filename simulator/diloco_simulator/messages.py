"""What travels in calls, as protobuf.py makes it of protobuf messages: who speaks, and what is said."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_common.codec import Payload
from diloco_common.manifest import TensorSpec
from diloco_common.messages import FragmentStatus, Held, LearnerPolicy, Pulse, PushHeader


@dataclass(frozen=True, slots=True)
class JoinRequest:
    learner_id: str
    process_id: str
    tensors: tuple[TensorSpec, ...]
    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    generation: int
    epoch: int
    heartbeat_s: float
    shard_index: int
    num_shards: int
    num_fragments: int
    manifest_digest: str
    policy: LearnerPolicy
    fragments: tuple[FragmentStatus, ...]
    pulse: Pulse


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Also says goodbye, with fragment -1."""

    learner_id: str
    generation: int
    epoch: int
    fragment_id: int
    have: tuple[int, int] | None
    """Epoch and version that the caller has."""


@dataclass(frozen=True, slots=True)
class PullAnswer:
    version: int
    epoch: int
    payload: Payload
    merged_version: int
    forgotten_version: int
    tokens_merged: int
    base_version: int | None
    """The payload is the change since this version; None: the values themselves."""


@dataclass(frozen=True, slots=True)
class PushRequest:
    learner_id: str
    generation: int
    epoch: int
    header: PushHeader
    payload: Payload
