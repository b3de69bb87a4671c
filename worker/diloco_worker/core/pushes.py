"""The pushes of one contribution: which are under way, and whether another may begin.

A round may ask again for what is under way. What was sent under one lease may be sent again under the next. Only an
answer under the current lease counts. LATE or REJECTED is then final, whatever became of the pushes before. A shard
that holds the contribution, or has merged it, answers DUPLICATE instead. It takes nothing more that was sent under
older leases.
"""

from __future__ import annotations

from typing import NamedTuple

from diloco_common.wire.messages import Outcome, PushAnswer


class Lease(NamedTuple):
    """The right of one learner to contribute to one shard."""

    epoch: int
    """Of the shard that gave it."""
    generation: int
    """Counts anew in each epoch; 0: no lease."""


class Pushes:
    """What was sent of one contribution, and whether to send it again. Owned by whoever sends."""

    def __init__(self) -> None:
        self.may_have_arrived = False
        """Whether values of the contribution were ever sent: a shard may have them. Never reset."""
        self.is_refused = False
        """Whether it came too late, or was refused. Nobody pushes it again. Never reset."""
        self._under_way: set[Lease] = set()

    def begin(self, lease: Lease) -> bool:
        """Whether to push now: not while a push under this lease is under way, and not what was refused."""
        if self.is_refused or lease in self._under_way:
            return False
        self._under_way.add(lease)
        return True

    def sending_values(self) -> None:
        """Values are about to leave. Word that they are not finite is no value: no version can hold it."""
        self.may_have_arrived = True

    def ended(self, lease: Lease, answer: PushAnswer | None) -> None:
        """The push under this lease has its answer; None: it will never have one, or not under the current lease."""
        self._under_way.discard(lease)
        if answer is not None and answer.outcome in (Outcome.LATE, Outcome.REJECTED):
            self.is_refused = True
