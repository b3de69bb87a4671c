"""Leaving with warning: what a learner has trained goes into a version before it is gone.

It tells each shard which fragments hold work that nobody else has. The shard opens a round of each out of turn, and the
learner contributes as to any other. Where a contribution is under way, its fate is waited for first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from diloco_worker.ending import Ending

LEAVE_S = 25.0
"""For what was trained since the last contributions. Clouds give 30 seconds of warning, or more."""


class Leaving(Ending):
    """What is still to be handed over."""

    usual_s = LEAVE_S

    def missing(self) -> Mapping[str, str]:
        """Work that no version has, as far as a shard would still make one."""
        core, shards = self._boundary.core, self._boundary.shards
        if core is None:
            return {}  # nothing was trained
        unmerged = Counter(f.fragment.shard_index for f in core.of_model if f.tokens_since(core.tokens) > 0)
        address = {c.state.shard_index: c.address for c in self._connections}
        held = {address.get(i, f"shard {i}"): n for i, n in unmerged.items() if not shards.has_stopped(i)}
        return {shard: f"work on {n} fragments of {shard}" for shard, n in held.items()}
