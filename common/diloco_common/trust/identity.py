"""Who the caller is, and what it may do. This is the same for every transport, and known before any payload byte.

A caller names itself. If a certificate proves it, the certificate's scope decides which calls it may make.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from diloco_common.errors import BadRequest, ConfigError, WrongIdentity

_NAME = r"[A-Za-z0-9._-]{1,64}"
_LEARNER_ID = re.compile(rf"{_NAME}\Z")
_SUBJECT = re.compile(rf"(learner|shard|observer|mirror|standby|admin)/({_NAME})\Z")
_URI = re.compile(rf"diloco://({_NAME})/(.+)\Z")


class Scope(StrEnum):
    LEARNER = "learner"  # trains under one learner id
    SHARD = "shard"  # serves; its name is its index
    OBSERVER = "observer"  # reads the model
    MIRROR = "mirror"  # holds and serves what shards announce; any name
    STANDBY = "standby"  # holds a shard's version files; any name
    ADMIN = "admin"  # a person who runs the run


@dataclass(frozen=True, slots=True)
class Subject:
    """A member of a run, as certificates name it."""

    run_id: str
    scope: Scope
    name: str

    def __str__(self) -> str:
        """Short form, for people who know the run: learner/a."""
        return f"{self.scope.value}/{self.name}"

    @property
    def uri(self) -> str:
        """The form in certificates: diloco://RUN/learner/a."""
        return f"diloco://{self.run_id}/{self}"


def subject_of(run_id: str, text: str) -> Subject:
    """Parse a subject such as learner/a. Raises ConfigError."""
    found = _SUBJECT.match(text)
    if found is None or (found[1] == Scope.SHARD and not _is_index(found[2])):
        raise ConfigError(
            f"{text[:80]!a} names nobody: write learner/ID, observer/NAME, mirror/NAME, standby/NAME or "
            "admin/NAME (1 to 64 of A-Z a-z 0-9 . _ -), or shard/N with the shard's index"
        )
    return Subject(run_id, Scope(found[1]), found[2])


def subject_of_uri(uri: str) -> Subject:
    """The subject of a URI. Raises ConfigError."""
    found = _URI.match(uri)
    if found is None:
        raise ConfigError(f"{uri[:80]!a} is not like diloco://RUN/learner/ID")
    return subject_of(found[1], found[2])


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and name == str(int(name))


@dataclass(frozen=True, slots=True)
class Proof:
    subject: Subject
    serial: str
    """The certificate's serial: lower-case hexadecimal digits without leading zeros."""
    expires: float
    """Seconds since 1970."""


_READS = frozenset({"Observe", "Pull", "Follow"})
MAY = {
    Scope.LEARNER: _READS | {"Join", "Attend", "Push", "Leave"},
    Scope.OBSERVER: _READS,
    Scope.MIRROR: _READS | {"Mirror"},
    Scope.STANDBY: _READS | {"Standby"},
    Scope.ADMIN: _READS,
    Scope.SHARD: _READS | {"Standby"},
}
"""The calls that each scope may make. Observe is a Join without a lease; Mirror and Standby are Follow in that role; a
promoted standby is a shard."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller and its lease."""

    run_id: str
    learner_id: str = ""
    """Empty: the caller is an observer."""
    generation: int = 0
    """0: no lease (a Join, or an observer)."""
    epoch: int = 0
    """The epoch in which the shard gave the lease."""
    peer: str = ""
    """The caller's address without the port; empty if the transport knows none."""
    proof: Proof | None = None
    """None: the caller names itself without proof."""
    rank: int = 0
    """Rank of the process in an island, whose ranks share the lease of their leader, rank 0."""

    @property
    def account(self) -> str:
        """Who is charged for calls without a lease: the proven identity, or else the caller's host.

        So learners behind one proxy or NAT do not use up each other's share if they prove who they are.
        """
        if self.proof is not None:
            subject = self.proof.subject
            return subject.name if subject.scope is Scope.LEARNER else str(subject)
        return self.peer

    def check_may(self, *calls: str) -> None:
        """Raises WrongIdentity unless it may make one of these calls. Callers without proof may make any call."""
        if self.proof is None or not MAY[self.proof.subject.scope].isdisjoint(calls):
            return
        raise WrongIdentity(f"{self.proof.subject} may not call {calls[0]}; that is for other scopes")


def check_learner_id(learner_id: str) -> None:
    if not _LEARNER_ID.match(learner_id):
        raise BadRequest(f"learner id {learner_id[:64]!r} is not 1 to 64 of A-Z a-z 0-9 . _ -")
