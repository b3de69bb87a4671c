"""`LearnerView`: a learner's answers about its own progress, the run's progress, and its identity.

All properties may be read in any thread, and never wait.
"""

from __future__ import annotations

import hashlib

from diloco_worker.shell.boundary import StepBoundary
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.telemetry import LearnerTelemetry


class LearnerView:
    """The read-only half of `Learner`."""

    def __init__(
        self, boundary: StepBoundary, connections: Connections, telemetry: LearnerTelemetry, index: int | None
    ) -> None:
        """`index`: the learner's number in an earlier process; None: it had none yet."""
        self.connections = connections
        self.telemetry = telemetry
        self._boundary = boundary
        self._index = index

    # ------------------------------------------------------------ this learner

    @property
    def learner_id(self) -> str:
        return self.telemetry.caller.learner_id

    @property
    def state(self) -> str:
        """ "joining", "training", "done" or "stopped"."""
        return self.telemetry.state

    @property
    def inner_step(self) -> int:
        """Inner steps taken by this learner, including those of the processes whose `state` it continues."""
        return self._boundary.figures().inner_step

    @property
    def tokens(self) -> int:
        """Tokens trained by this learner, including earlier processes as in `inner_step`."""
        return self._boundary.figures().tokens

    @property
    def index(self) -> int:
        """This learner's number: when shard 0 assigned it, the smallest from 0 that no other live learner had.

        It stays the same while the learner runs, over restarts with `state`, and if the learner comes back under its id
        before another one has taken the number. Right after a restart of shard 0, two learners may have the same number
        until both have joined. So use it to split data, and not as a proof of anything.
        """
        if self._index is None and self.state != "joining":
            self._index = self.connections.index
        return self._index or 0

    def number(self, index: int) -> None:
        self._index = index

    @property
    def seed(self) -> int:
        """31 bits from the run and learner ids alone: the same after a restart, different for every learner. Use it to
        seed the order of the data, never for values that must be equal in all learners."""
        caller = self.telemetry.caller
        return int.from_bytes(hashlib.sha256(f"{caller.run_id}/{caller.learner_id}".encode()).digest()[:4]) >> 1

    @property
    def done(self) -> bool:
        """Whether to stop training: all shards have merged the token budget, or `stop` was called."""
        return self._boundary.is_stop_asked or self._boundary.shards.have_stopped

    # ------------------------------------------------------------ the run

    @property
    def tokens_merged(self) -> int:
        """Tokens that the run has merged so far, over all learners."""
        return self._boundary.pulse.tokens_merged

    @property
    def tokens_budget(self) -> int:
        """Tokens that the run should merge; 0 if it has no end."""
        return self._boundary.pulse.tokens_budget

    @property
    def learners_alive(self) -> int:
        """Learners that hold a lease, including this one, by the last message of the shards."""
        return self._boundary.pulse.learners_alive

    @property
    def fraction(self) -> float:
        """Global progress from 0 to 1: merged tokens over the budget; 0 without a budget."""
        return min(1.0, self.tokens_merged / self.tokens_budget) if self.tokens_budget else 0.0
