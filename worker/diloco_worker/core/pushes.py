"""The pushes of one contribution: which are under way, and what their answers say about it.

A round may ask again for what is under way, and what was sent under one lease may be sent again under the next. So a
refusal alone does not tell that a contribution was not merged: another push of it may have been accepted.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from diloco_common.messages import Outcome, PushAnswer


@dataclass
class Pushes:
    """Owned by whoever sends; the learner only hears what `ended` returns."""

    under_way: set[Hashable] = field(default_factory=set)
    """The leases that they are made under."""
    may_be_taken: bool = False
    """Whether a shard has taken the contribution, or may have: then only a version tells that it was not merged."""

    def begin(self, lease: Hashable) -> bool:
        """Whether to push now: not while a push under this lease is under way."""
        if lease in self.under_way:
            return False
        self.under_way.add(lease)
        return True

    def ended(self, lease: Hashable, answer: PushAnswer | None) -> PushAnswer | None:
        """A push has its answer, or will never have one (None). Returns what holds for the contribution; None: unknown.

        A refusal holds when no other push of it is under way, and none can have been accepted.
        """
        self.under_way.discard(lease)
        if answer is None or answer.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            self.may_be_taken = True
            return answer
        return None if self.under_way or self.may_be_taken else answer
