"""When a learner whose values are NaN or infinite gives up: once round after round has refused them.

Nothing mends such values: every version is added to them, and the optimizer's moments are mostly not finite either. A
process that went on would train in vain, and nobody would notice.
"""

from __future__ import annotations

from collections import defaultdict

from diloco_common.errors import NotFinite
from diloco_common.messages import Outcome, PushAnswer

REFUSALS_MAX = 5
"""Rounds in a row that refuse a fragment of this learner because it is not finite. The last one ends the learner."""


class Diverging:
    """Refusals in a row, by fragment."""

    def __init__(self) -> None:
        self._refused: defaultdict[int, set[int]] = defaultdict(set)
        """Fragment -> rounds that have refused it since it was accepted or merged. In an island the answers of all
        ranks to one round come here."""

    def answered(self, fragment_id: int, round_number: int, answer: PushAnswer) -> NotFinite | None:
        """A push has its outcome. Returns the error that ends the learner, if that was one refusal too many."""
        refused = self._refused[fragment_id]
        if answer.outcome is Outcome.REJECTED and answer.code == NotFinite.code:
            refused.add(round_number)
        elif answer.outcome is Outcome.ACCEPTED:
            refused.clear()
        if len(refused) < REFUSALS_MAX:
            return None
        return NotFinite(
            f"the model holds NaN or infinite values, and {REFUSALS_MAX} rounds in a row refused them. This learner "
            "ends. Start it again with a new optimizer, and without state=: it begins with the values of the run. "
            "If it happens again, lower its rate, or clip its gradients"
        )

    def merged(self, fragment_id: int) -> None:
        """A contribution is in a version. Ranks of an island do not hear that a push is accepted."""
        self._refused[fragment_id].clear()
