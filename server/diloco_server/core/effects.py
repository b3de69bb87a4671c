"""Effects that the core asks its shell for: send a message, compute a version, or report a fact (`ledger.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco_common.codec import Payload
from diloco_common.wire.messages import Directive
from diloco_server.core.ledger import Fact, Ledger
from diloco_server.core.membership import Member, Membership
from diloco_server.core.parts import PartedPayload
from diloco_server.core.round import Contribution


class Tell(NamedTuple):
    """Send a directive on the control stream of this learner's generation, if it has one."""

    learner_id: str
    generation: int
    directive: Directive


@dataclass(frozen=True, slots=True)
class TellAll:
    """Send a directive to all these members with one effect: a round may ask a thousand learners."""

    members: Sequence[Member]
    directive: Directive


@dataclass(frozen=True, slots=True)
class SeedFragment:
    """Compute version 0 from this payload.

    Then take `Versions.seed_record`, store both, and pass the record to `Versions.seeded`. On failure call
    `FragmentState.fail_seed`.
    """

    fragment_id: int
    payload: Payload | PartedPayload


@dataclass(frozen=True, slots=True)
class MergeRound:
    """Merge these contributions into the next version.

    Then take `Versions.next_record` once, store both, and pass the same record to `Shard.committed`.
    """

    fragment_id: int
    version: int
    contributions: tuple[Contribution, ...]
    beside: tuple[Contribution, ...] = ()
    """For buffers: the last contributions, from earlier rounds, of learners that are not in this round."""
    left_out: tuple[Contribution, ...] = ()
    """Contributions that are compared but not merged (`influence.py`)."""


Effect = Tell | TellAll | SeedFragment | MergeRound | Fact


class Outbox:
    """Effects that the shell has not taken yet, in order, and the ledger of their facts."""

    def __init__(self, membership: Membership) -> None:
        self.ledger = Ledger()
        self.now = 0.0
        self._membership = membership
        self._effects: list[Effect] = []

    def add(self, effect: Tell | TellAll | SeedFragment | MergeRound) -> None:
        self._effects.append(effect)

    def note(self, fact: Fact) -> None:
        self.ledger.note(fact, self.now)
        self._effects.append(fact)

    def tell(self, member: Member, directive: Directive) -> None:
        self.add(Tell(member.learner_id, member.generation, directive))

    def tell_live(self, directive: Directive) -> None:
        self.tell_all(self._membership.live(), directive)

    def tell_all(self, members: Sequence[Member], directive: Directive) -> None:
        self.add(TellAll(members, directive))

    def take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
