"""When a learner whose values are NaN or infinite gives up: once round after round has refused them.

Nothing mends such values: every version is added to them, and the optimizer's moments are mostly not finite either. A
process that went on would train in vain, and nobody would notice.

NaN is in all fragments within a step. One shard that says so alone, of several, is not believed.
"""

from __future__ import annotations

from collections import defaultdict

from diloco_common.errors import NotFinite
from diloco_common.wire.messages import Outcome, PushAnswer

REFUSALS_MAX = 5
"""Rounds in a row that refuse a fragment of this learner because it is not finite. The last one ends the learner."""


class Diverging:
    """Refusals in a row, by fragment."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._full: dict[int, int] = {}
        """Fragment -> its shard, where there were too many refusals in a row."""
        self._refused: defaultdict[int, set[int]] = defaultdict(set)
        """Fragment -> rounds that have refused it since it was accepted or merged. In an island the answers of all
        ranks to one round come here."""

    def answered(
        self, fragment_id: int, shard_index: int, round_number: int, answer: PushAnswer
    ) -> NotFinite | None:  # fmt: skip
        """A push has its outcome. Returns the error that ends the learner, if that was one refusal too many for most of
        the shards."""
        refused = self._refused[fragment_id]
        if answer.outcome is Outcome.REJECTED and answer.code == NotFinite.code:
            refused.add(round_number)
        elif answer.outcome is Outcome.ACCEPTED:
            self.merged(fragment_id)
        if len(refused) >= REFUSALS_MAX:
            self._full[fragment_id] = shard_index
        if 2 * len(set(self._full.values())) <= self._num_shards:
            return None
        return NotFinite(
            f"the model holds NaN or infinite values, and {REFUSALS_MAX} rounds in a row refused them. This learner "
            "ends. Start it again with a new optimizer, and without state=: it begins with the values of the run. "
            "If it happens again, lower its rate, or clip its gradients"
        )

    def merged(self, fragment_id: int) -> None:
        """A contribution is in a version. Ranks of an island do not hear that a push is accepted."""
        self._refused[fragment_id].clear()
        self._full.pop(fragment_id, None)
