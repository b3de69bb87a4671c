"""Leaving with warning: what a learner has trained goes into a version before it is gone.

It tells each shard which fragments hold work that nobody else has. The shard opens a round of each out of turn, and the
learner contributes as to any other. Where a contribution is under way, its fate is waited for first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from diloco_worker.boundary import StepBoundary
from diloco_worker.connections import Connections

WORDS_MAX = 150
"""What the leader of an island says to its other ranks."""


class Leaving:
    """What is still to be handed over. Owned by the training thread."""

    def __init__(
        self, boundary: StepBoundary, connections: Connections, agree: Callable[[str], str] | None = None
    ) -> None:
        """`agree`: as of `Finishing`."""
        self._boundary = boundary
        self._connections = connections
        self._agree = agree

    def look(self, waited_s: float, wait_s: float) -> tuple[bool, str]:
        """Whether to wait no longer, of at most `wait_s` seconds; and what is in no version, in words: empty if all
        is."""
        missing = self._missing()
        is_over = waited_s >= wait_s or not missing
        if self._agree is None:
            return is_over, missing
        said = self._agree(f"{is_over:d}{missing}"[:WORDS_MAX])
        return said[0] == "1", said[1:]

    def _missing(self) -> str:
        core, shards = self._boundary.core, self._boundary.shards
        if core is None:
            return ""  # nothing was trained
        unmerged = Counter(f.fragment.shard_index for f in core.of_model if f.tokens_since(core.tokens) > 0)
        address = {c.state.shard_index: c.address for c in self._connections}
        return "; ".join(
            f"work on {n} fragments of {address.get(i, f'shard {i}')}"
            for i, n in unmerged.items()
            if not shards.has_stopped(i)  # it makes no more versions
        )
