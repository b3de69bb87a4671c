"""What a shard says of itself to one caller, all of it as it is at one moment."""

from __future__ import annotations

from diloco_common.manifest import TensorSpec
from diloco_common.messages import JoinAnswer, PullHeader
from diloco_server.core.fragment import status_of
from diloco_server.core.record import Record
from diloco_server.core.shard import Shard


def join_answer(
    shard: Shard, learner_id: str = "", generation: int = 0, tensors: tuple[TensorSpec, ...] = (), index: int = 0,
    rules: str = "",
) -> JoinAnswer:  # fmt: skip
    """What a learner, or an observer (neither id nor generation), needs to know of the run."""
    settings = shard.settings
    return JoinAnswer(
        generation=generation,
        epoch=shard.epoch,
        heartbeat_s=settings.lease.heartbeat_s,
        shard_index=settings.shard.index,
        num_shards=settings.shard.count,
        num_fragments=settings.sync.fragments,
        manifest_digest="" if shard.manifest is None else shard.manifest.digest,
        policy=shard.policy(),
        fragments=tuple(shard.fragment_statuses(learner_id)),
        pulse=shard.pulse(),
        tensors=tensors,
        ties=shard.ties if tensors else (),
        index=index,
        rules=rules,
    )


def pull_header(shard: Shard, learner_id: str, fragment_id: int, record: Record | None = None) -> PullHeader:
    """The version of a record, or the latest; without a payload, which is the caller's to choose.

    All of it is as it was when the version was announced, so every rank of an island hears the same. Raises
    UnknownFragment.
    """
    record = record or shard.owned(fragment_id).record
    status = status_of(record, learner_id)
    return PullHeader(
        fragment_id=fragment_id,
        version=status.version,
        epoch=status.epoch,
        merged_version=status.merged_version,
        forgotten_version=status.forgotten_version,
        tokens_merged=record.tokens_merged,
        payload=None,
    )
