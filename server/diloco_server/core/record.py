"""What is kept with a version: how it came to be, so that a restarted shard can go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from diloco_server.core.membership import Membership
from diloco_server.core.round import Round


@dataclass(frozen=True, slots=True)
class Record:
    """How a version came to be."""

    fragment_id: int
    epoch: int
    """That the version was made in: (epoch, version) names the same bytes for ever."""
    version: int
    merged_versions: dict[str, int]
    """Learner -> the last version that its contribution was merged into, this one included."""
    merged_by: dict[str, str]
    """Learner -> the process that contributed it."""
    tokens_merged: int
    norms: tuple[float, ...]
    """Of the contributions merged last, oldest first."""
    seed_norm: float
    """Norm of version 0."""
    forgotten_version: int = 0
    """The latest version with a contribution of a learner that `merged_versions` no longer names. Grows."""

    @property
    def identity(self) -> tuple[int, int]:
        """Epoch and version."""
        return self.epoch, self.version

    def copy(self) -> Record:
        """The same, with dicts of its own."""
        return replace(self, merged_versions=dict(self.merged_versions), merged_by=dict(self.merged_by))


def empty_record(fragment_id: int) -> Record:
    """Of a fragment that has no version yet."""
    return Record(fragment_id, 0, 0, {}, {}, 0, (), 0.0)


def next_record(
    before: Record, closed: Round, epoch: int, membership: Membership, *, norm_window: int, strangers_max: int
) -> Record:
    """The record of the version that a closed round makes.

    A stranger is a learner that this shard knows from before its restart only. Above `strangers_max` entries those
    merged longest ago are dropped.
    """
    merged_versions, merged_by = dict(before.merged_versions), dict(before.merged_by)
    norms, tokens, forgotten_version = [*before.norms], before.tokens_merged, before.forgotten_version
    for contribution in closed.contributions.values():
        tokens += contribution.tokens
        norms.append(contribution.norm)
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
        tokens_merged=tokens, norms=tuple(norms[-norm_window:]), forgotten_version=forgotten_version,
    )  # fmt: skip


def _long_gone(merged_versions: Mapping[str, int], membership: Membership, strangers_max: int) -> list[str]:
    over = len(merged_versions) - strangers_max
    if over <= 0:
        return []
    strangers = [i for i in merged_versions if membership.get(i) is None]
    return sorted(strangers, key=lambda i: (merged_versions[i], i))[:over]
