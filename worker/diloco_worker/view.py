"""What a training loop may ask a learner: how far it is, how far the run is, and who it is. Never waits.

All of this may be asked in any thread.
"""

from __future__ import annotations

import hashlib

from diloco_worker.shell.boundary import StepBoundary
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.telemetry import LearnerTelemetry


class LearnerView:
    """The questions; `Learner` does the rest."""

    def __init__(
        self, boundary: StepBoundary, connections: Connections, telemetry: LearnerTelemetry, index: int | None
    ) -> None:
        """`index`: the learner's number in an earlier process; None: it never had one."""
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
        """Inner steps that this learner has taken, in this process and in those whose `state` it goes on from."""
        return self._boundary.figures().inner_step

    @property
    def tokens(self) -> int:
        """Tokens that this learner has trained on, counted as `inner_step` is."""
        return self._boundary.figures().tokens

    @property
    def index(self) -> int:
        """A number for this learner, from 0: the smallest that no other live learner of the run has.

        It stays while the learner runs, over its restarts with `state`, and where it comes back under its id before
        somebody else has taken it. Shard 0 gives it, and learners that join after a restart of that shard may get one
        that another learner still has until both have joined. So it shares out data; it proves nothing.
        """
        if self._index is None and self.state != "joining":
            self._index = self.connections.index
        return self._index or 0

    def number(self, index: int) -> None:
        """Its number is this one: other ranks hear it from the leader."""
        self._index = index

    @property
    def seed(self) -> int:
        """A number of 31 bits, from the run and the learner id alone: the same after a restart, another one for every
        learner. Seed the order of the data with it, and nothing that must be equal in all learners."""
        caller = self.telemetry.caller
        return int.from_bytes(hashlib.sha256(f"{caller.run_id}/{caller.learner_id}".encode()).digest()[:4]) >> 1

    @property
    def done(self) -> bool:
        """Whether to stop training: every shard has merged the token budget, or `stop` was called."""
        return self._boundary.is_stop_asked or self._boundary.shards.have_stopped

    # ------------------------------------------------------------ the run

    @property
    def tokens_merged(self) -> int:
        """Tokens that the run has merged so far, over all learners."""
        return self._boundary.pulse.tokens_merged

    @property
    def tokens_budget(self) -> int:
        """Tokens that the run is to merge; 0 if it has no end."""
        return self._boundary.pulse.tokens_budget

    @property
    def learners_alive(self) -> int:
        """Learners that hold a lease, this one among them, as the shards have said it last."""
        return self._boundary.pulse.learners_alive

    @property
    def fraction(self) -> float:
        """Global progress, merged tokens over the budget, from 0 to 1; 0 if there is no budget."""
        return min(1.0, self.tokens_merged / self.tokens_budget) if self.tokens_budget else 0.0
