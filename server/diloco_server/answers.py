"""What a shard says of itself to one caller, all of it as it is at one moment."""

from __future__ import annotations

from diloco_common.manifest import TensorSpec
from diloco_common.messages import JoinAnswer, PullHeader
from diloco_server.core.shard import Shard


def join_answer(
    shard: Shard, learner_id: str = "", generation: int = 0, tensors: tuple[TensorSpec, ...] = ()
) -> JoinAnswer:
    """What a learner, or an observer (neither id nor generation), needs to know of the run."""
    assert shard.manifest is not None
    settings = shard.settings
    return JoinAnswer(
        generation=generation,
        epoch=shard.epoch,
        heartbeat_s=settings.lease.heartbeat_s,
        shard_index=settings.shard.index,
        num_shards=settings.shard.count,
        num_fragments=settings.sync.fragments,
        manifest_digest=shard.manifest.digest,
        policy=shard.policy(),
        fragments=tuple(shard.fragment_statuses(learner_id)),
        pulse=shard.pulse(),
        tensors=tensors,
    )


def pull_header(shard: Shard, learner_id: str, fragment_id: int) -> PullHeader:
    """The latest version; without a payload, which is the caller's to choose. Raises UnknownFragment."""
    state = shard.owned(fragment_id)
    status = state.status(learner_id)
    return PullHeader(
        fragment_id=fragment_id,
        version=status.version,
        epoch=status.epoch,
        merged_version=status.merged_version,
        forgotten_version=status.forgotten_version,
        tokens_merged=state.tokens_merged,
        payload=None,
    )
