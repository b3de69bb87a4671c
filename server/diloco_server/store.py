"""Where versions are kept. A version is announced only after `save` has returned.

`MemoryStore` keeps nothing beyond the process: a shard that restarts begins empty, in a new epoch, and is seeded again
by the learners that are still there, from the version they applied last.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Protocol

from diloco_server.core.fragment import Values


@dataclass(frozen=True)
class StoredVersion:
    """All that it takes to go on from a version."""

    fragment_id: int
    version: int
    values: Values
    merged_versions: dict[str, int]
    """Learner -> the last version that its contribution was merged into, this one included."""
    tokens_merged: int


class Store(Protocol):
    """One shard's versions. Called from the compute thread."""

    epoch: int
    """Counts the restores; no two lives of a shard have the same."""

    def save(self, version: StoredVersion) -> None:
        """Make a version durable. Raises OSError; the version is then not announced, and `save` is tried again."""


class MemoryStore:
    """Keeps nothing. The epoch is random, so that a learner tells a restarted shard from the one it knew."""

    def __init__(self) -> None:
        self.epoch = 1 + secrets.randbelow(2**31)

    def save(self, version: StoredVersion) -> None:
        """The values already live in memory."""
