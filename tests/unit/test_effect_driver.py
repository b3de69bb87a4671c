"""What becomes of a shard's effects: one record per version, and a job that fails says so."""

from __future__ import annotations

import pytest
import torch

from builders import asking, make_settings
from diloco_common.codec import Payload, encode_payload
from diloco_common.wire.manifest import TensorSpec
from diloco_common.wire.messages import Outcome, Progress, PushHeader
from diloco_lab.shard import LockstepShard
from diloco_server.core.fragment import FragmentState
from diloco_server.core.membership import Member
from diloco_server.core.record import Record, empty_record
from diloco_server.storage.version_file import StoredVersion

MODEL = [TensorSpec("w", (4,))]


class Watched(LockstepShard):
    """Writes down what happens to each version. Its disk may refuse."""

    def __init__(self) -> None:
        settings = make_settings(sync={"sync_every": 1, "quorum": "all"}, outer={"optimizer": "sgd", "momentum": 0.0})
        super().__init__(settings, 7, lambda: 0.0)
        self.kept: list[StoredVersion] = []
        self.announced: list[Record] = []
        self.refuses = False

    async def keep(self, version: StoredVersion) -> None:
        if self.refuses:
            raise OSError("no space left on device")
        self.kept.append(version)

    def announcing(self, state: FragmentState) -> None:
        assert state.record == self.kept[-1].record, "durable first"
        self.announced.append(state.record)

    def joined(self) -> Member:
        member = self.shard.join("ann", asking(MODEL), 0.0)
        self.shard.progress(member, Progress(0, 0), 0.0)
        return member

    def bring(self, member: Member, round_number: int) -> Outcome:
        """A seed, or a contribution to round 1."""
        payload: Payload = encode_payload(torch.full((4,), 1.0 + round_number), "float32")
        tokens = round_number and 10
        header = PushHeader(0, round_number, 7, 0, tokens, tokens, payload.header, self.shard.manifest.digest)
        return self.push(member, header, payload).outcome


def test_disk_core_and_history_get_the_same_record_of_a_version() -> None:
    shard = Watched()
    member = shard.joined()
    assert shard.bring(member, 0) is Outcome.ACCEPTED
    shard.shard.progress(member, Progress(1, 10), 0.0)
    shard.advance()
    assert shard.bring(member, 1) is Outcome.ACCEPTED

    assert [(v.record.epoch, v.record.version, v.record.tokens_merged) for v in shard.kept] == [(7, 0, 0), (7, 1, 10)]
    assert shard.announced == [v.record for v in shard.kept]
    state = shard.shard.fragments[0]
    assert (state.version_id, state.tokens_merged) == ((7, 1), 10)
    assert state.status("ann").merged_version == shard.kept[-1].record.merged_versions["ann"] == 1


def test_a_seed_that_cannot_be_kept_is_not_announced_and_another_may_follow() -> None:
    shard = Watched()
    member = shard.joined()
    shard.refuses = True
    with pytest.raises(OSError, match="no space left"):
        shard.bring(member, 0)
    assert shard.announced == []
    assert not shard.shard.versions.all_seeded
    assert shard.shard.fragments[0].record == empty_record(0), "nothing of it is left"

    shard.refuses = False
    assert shard.bring(member, 0) is Outcome.ACCEPTED
    assert shard.shard.versions.all_seeded
