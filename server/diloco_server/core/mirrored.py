"""A mirror: a shard that serves another shard's versions and accepts no contributions."""

from __future__ import annotations

from dataclasses import replace

from diloco_common.errors import BadRequest
from diloco_common.wire.manifest import Manifest, TensorSpec
from diloco_common.wire.messages import JoinAnswer, JoinRequest, Pulse
from diloco_server.core.arithmetic import Published
from diloco_server.core.membership import Member
from diloco_server.core.record import Record
from diloco_server.core.shard import Shard


class MirroredShard(Shard):
    told: JoinAnswer | None = None
    """The mirrored shard's answer to readers; None: not received yet."""

    def mirror(self, told: JoinAnswer, manifest: Manifest) -> None:
        self.told = told
        self.versions.mirror(manifest, told.shard_index)

    def mirrored(self, record: Record, published: Published) -> None:
        self.versions.mirrored(record, published)

    def join(self, learner_id: str, request: JoinRequest, now: float) -> Member:
        """Raises BadRequest."""
        raise BadRequest(f"this is a mirror of {self.settings.shard.mirror_of}; join its shards instead")

    def pulse(self) -> Pulse:
        return super().pulse() if self.told is None else self.told.pulse

    def join_answer(
        self, learner_id: str = "", generation: int = 0, tensors: tuple[TensorSpec, ...] = (), index: int = 0,
        rules: str = "",
    ) -> JoinAnswer:  # fmt: skip
        own = super().join_answer(learner_id, generation, tensors, index, rules)
        return own if self.told is None else replace(self.told, fragments=own.fragments)
