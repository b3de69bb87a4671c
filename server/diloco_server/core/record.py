"""The record stored with each version, from which a restarted shard continues."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from diloco_common.wire import bounds
from diloco_common.wire.messages import VersionId
from diloco_server.core.membership import Membership
from diloco_server.core.round import LengthLimit, Round

MERGES = ("mean", "agreement")
"""The merge rules that `sync.merge = "auto"` chooses from."""


@dataclass(frozen=True, slots=True)
class Record:
    fragment_id: int
    epoch: int
    version: int
    merged_versions: dict[str, int]
    """Learner -> the last version, including this one, with its contribution."""
    merged_by: dict[str, str]
    """Learner -> the process that made that contribution."""
    tokens_merged: int
    """Counted tokens (`influence.py`). Stops at `bounds.TOKENS_COUNTED_MAX`, so it can always be sent."""
    forgotten_version: int = 0
    """The latest version with a contribution of a learner that is no longer in `merged_versions`. It never falls."""
    limit: LengthLimit | None = None
    """The length limit after the last round (`influence.py`); None: no round has set it."""
    merge: str = ""
    """The merge rule that the run chose (`versions.py`); empty: the settings name it, or nothing was merged yet."""

    @property
    def version_id(self) -> VersionId:
        return VersionId(self.epoch, self.version)

    def copy(self) -> Record:
        return replace(self, merged_versions=dict(self.merged_versions), merged_by=dict(self.merged_by))


def check_record(record: Record) -> None:
    """Check that a shard can continue from every number and send it. Raises a ValueError that names a wrong one.

    A version file is checked like a call: anyone who can write a file can write a matching checksum.
    """
    counts = [
        ("fragment_id", record.fragment_id, bounds.FRAGMENTS_MAX - 1),
        ("epoch", record.epoch, bounds.EPOCH_KEPT_MAX),
        ("version", record.version, bounds.VERSION_KEPT_MAX),
        ("forgotten_version", record.forgotten_version, record.version),
        ("tokens_merged", record.tokens_merged, bounds.TOKENS_COUNTED_MAX),
        *((f"merged_versions of {learner[:64]!r}", v, record.version) for learner, v in record.merged_versions.items()),
    ]
    for what, count, most in counts:
        if not 0 <= count <= most:
            raise ValueError(f"{what} is {count}, not 0 to {bounds.number(most)}")
    limit = record.limit
    if limit is not None and not (0 < limit.length < math.inf and 0 < limit.steps <= bounds.STEPS_MAX):
        raise ValueError(
            f"limit is {limit}, not a finite length above 0 at 1 to {bounds.number(bounds.STEPS_MAX)} steps"
        )
    if record.merge not in ("", *MERGES):
        raise ValueError(f"merge is {record.merge[:64]!r}, not one of {', '.join(MERGES)}")
    for learner, process in record.merged_by.items():
        if len(learner) > bounds.NAME_MAX or len(process) > bounds.NAME_MAX:
            raise ValueError(f"merged_by has a name of more than {bounds.NAME_MAX} characters: {learner[:64]!r}")


def empty_record(fragment_id: int) -> Record:
    return Record(fragment_id, 0, 0, {}, {}, 0)


def next_record(
    before: Record, closed: Round, epoch: int, membership: Membership, *, strangers_max: int, merge: str
) -> Record:
    """The record of the version that a closed round makes.

    A stranger here is a learner that this shard knows only from before its restart. If there are more than
    `strangers_max` entries, those merged longest ago are dropped.
    """
    merged_versions, merged_by = dict(before.merged_versions), dict(before.merged_by)
    tokens, forgotten_version = before.tokens_merged, before.forgotten_version
    for contribution in closed.contributions.values():
        tokens += contribution.counted
        member = membership.get(contribution.learner_id)
        if member is not None and contribution.generation >= member.first_generation:
            merged_versions[member.learner_id] = closed.round
            merged_by[member.learner_id] = member.process_id
        else:  # it was forgotten, or another process has taken its place
            forgotten_version = closed.round
    for learner_id in _long_gone(merged_versions, membership, strangers_max):
        forgotten_version = max(forgotten_version, merged_versions.pop(learner_id))
        merged_by.pop(learner_id, None)
    assert forgotten_version >= before.forgotten_version
    return replace(
        before, epoch=epoch, version=closed.round, merged_versions=merged_versions, merged_by=merged_by,
        tokens_merged=min(tokens, bounds.TOKENS_COUNTED_MAX), forgotten_version=forgotten_version, limit=closed.limit,
        merge=merge,
    )  # fmt: skip


def _long_gone(merged_versions: Mapping[str, int], membership: Membership, strangers_max: int) -> list[str]:
    over = len(merged_versions) - strangers_max
    if over <= 0:
        return []
    strangers = [i for i in merged_versions if membership.get(i) is None]
    return sorted(strangers, key=lambda i: (merged_versions[i], i))[:over]
