"""Leases: who may speak, and what follows for rounds and versions when somebody comes or goes.

`membership.py` holds the leases themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_common.errors import Revoked, StaleGeneration, Superseded
from diloco_common.manifest import TensorSpec
from diloco_common.messages import Evicted, FrozenTensor, Held, Tie
from diloco_server.core.effects import Outbox
from diloco_server.core.ledger import LearnerForgotten, LearnerGone, LearnerJoined
from diloco_server.core.membership import Member, Membership, superseded
from diloco_server.core.rounds import Rounds
from diloco_server.core.versions import Versions


class Leases:
    """The learners of one shard, coming and going."""

    def __init__(self, membership: Membership, rounds: Rounds, versions: Versions, outbox: Outbox) -> None:
        self._membership = membership
        self._rounds = rounds
        self._versions = versions
        self._outbox = outbox

    def join(
        self, learner_id: str, process_id: str, tensors: Sequence[TensorSpec], now: float, held: Sequence[Held],
        frozen: Sequence[FrozenTensor], ties: Sequence[Tie], index: int | None, age_s: float,
    ) -> Member:  # fmt: skip
        """Grant a lease; the one before it ends. Raises Superseded, ManifestMismatch, FrozenMismatch or Busy."""
        self._membership.welcome(learner_id, process_id, now - age_s)
        self._versions.adopt_or_check(tensors)
        self._versions.check_frozen(frozen)
        old = self._membership.get(learner_id)
        if old is not None and old.live:
            if old.process_id == process_id:
                self._end(old, StaleGeneration.code, f"{learner_id} has joined again")
            else:
                self._end(old, Superseded.code, str(superseded(learner_id)))
        member = self._membership.join(learner_id, process_id, now, index, age_s)
        self._versions.frozen.adopt(learner_id, frozen)
        self._versions.ties = self._versions.ties or tuple(ties)
        self._membership.replace(member, self._versions.forget_others(learner_id, process_id))
        self._outbox.note(LearnerJoined(learner_id, member.generation, returned=old is not None))
        for state in self._versions.look_for_losses(learner_id, held):
            self._rounds.ask_missing(state)
        return member

    def leave(self, member: Member) -> None:
        """A learner says goodbye."""
        self._membership.leave(member)
        self._outbox.note(LearnerGone(member.learner_id, member.generation, "LEFT"))
        self._rounds.leave(member)

    def revoke(self, member: Member) -> None:
        """A learner may call no longer."""
        self._membership.revoke(member)
        self._end(member, Revoked.code, f"{member.learner_id} was revoked")

    def expire(self, now: float) -> None:
        """End the leases that ran out, and forget learners that have been gone for too long."""
        for member in self._membership.expire(now):
            refusal = self._membership.eviction(member)
            self._end(member, refusal.code, str(refusal))
        for learner_id in self._membership.forget():
            self._versions.forget(learner_id)
            self._rounds.trust.forget(learner_id)
            self._outbox.note(LearnerForgotten(learner_id))

    def _end(self, member: Member, code: str, words: str) -> None:
        """A generation is over: tell it, and fence it off."""
        self._outbox.tell(member, Evicted(code, words))
        self._outbox.note(LearnerGone(member.learner_id, member.generation, code))
        self._rounds.lose(member, code)
