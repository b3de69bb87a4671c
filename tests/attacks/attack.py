"""What an attack is: what it needs, how it is done, and what must be seen afterwards.

An attack strikes from a process of its own, with what its attacker would have: addresses and perhaps a credential. It
tells what it saw. The scene (scene.py) watches the shard and the honest learners meanwhile. The attack's `judge`, and
the rules that hold for all attacks, say from both what went wrong.
"""

from __future__ import annotations

import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc
from honest_learners import Report

Over = Callable[[], bool]
RSS_MORE = 64 * 2**20
"""Bytes that an attack may cost a shard at most."""
KEPT_UP_MIN = 0.1
"""Of the rounds that the honest learner's steps are for: less is a standstill. How much less than all there are depends
on what the attacker, who is on this machine too, leaves of its cores."""
MOST_LINES = 500
"""Lines of log that an attack may cost at most."""


TRIED_S = 40.0
"""So long an attack may take until it has come to something on a busy machine."""


def once_tried(over: Over, tried: Callable[[], bool]) -> Over:
    """Its time is over, but not before it was tried."""
    deadline = time.monotonic() + TRIED_S
    return lambda: over() and (tried() or time.monotonic() > deadline)


class Needs(Enum):
    NOTHING = "nothing"
    TOKEN = "token"  # that all learners of the run share
    CERTIFICATE = "cert"  # of a learner, its own; the shard asks for certificates, and not for a token


@dataclass(frozen=True)
class Credential:
    token: str | None = None
    authority: bytes | None = None
    """Certificate of the run's CA, PEM; None: plaintext."""
    certificate: bytes | None = None
    key: bytes | None = None
    learner_id: str = "mallory"
    """The identity that it proves, if it is a certificate."""

    def context(self, *, shows_it: bool) -> ssl.SSLContext | None:
        """TLS of one's own making, that believes any shard. None: plaintext."""
        if self.authority is None:
            return None
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
        made.set_alpn_protocols(["h2"])
        if shows_it and self.certificate is not None and self.key is not None:
            with tempfile.NamedTemporaryFile() as file:  # it takes files alone
                file.write(self.key + self.certificate)
                file.flush()
                made.load_cert_chain(file.name)
        return made

    def channel(self, address: str, options: list[tuple[str, int]]) -> grpc.Channel:
        if self.authority is None:
            return grpc.insecure_channel(address, options=options)
        proof = grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)
        return grpc.secure_channel(address, proof, options=options)


@dataclass(frozen=True)
class Target:
    grpc: str
    http: str
    credential: Credential
    run: str = "local"
    victim: str = "ann"
    """The id of an honest learner."""
    fresh: bool = False
    """Nobody has joined this shard."""


@dataclass
class Seen:
    answers: Counter[str] = field(default_factory=Counter)
    """By stable code, by outcome of a push, or "OK"; a gRPC status without a stable code begins with "status "."""
    facts: dict[str, float] = field(default_factory=dict)
    """What else it found out, by name."""
    error: str = ""
    """The traceback of an attack that broke down: the attack is wrong."""

    @property
    def without_code(self) -> int:
        """Calls that ended with an error status without a stable code, and not because a connection was closed."""
        ended = ("status UNAVAILABLE", "status CANCELLED", "status DEADLINE_EXCEEDED")
        return sum(n for answer, n in self.answers.items() if answer.startswith("status ") and answer not in ended)

    def took(self, *answers: str) -> int:
        return sum(self.answers[answer] for answer in answers)


@dataclass
class Evidence:
    seen: Seen
    rss_more: int
    """Bytes that the shard's RSS grew by, at most."""
    lines: int
    """That the shard logged meanwhile."""
    tracebacks: int
    before: Report | None
    after: Report | None
    """Of the honest learners; None: the process has ended, or nobody trained."""
    status: dict[str, Any]
    """What the shard says of itself afterwards; empty if it does not."""
    status_before: dict[str, Any]
    shard_ended: bool
    went_on: bool
    """While the attack was on, all that the honest learner had trained on before it came into versions."""
    kept_up: float
    """Versions per inner step while the attack was on, over what `sync` asks for: 1 if nobody is in the way."""
    late: str | None = None
    """What became of a learner that came during or after the attack: "" if it trains; None if none was sent."""
    restarted: str = ""
    """Why the shard could not be started again from its data folder."""


def _nothing(_: Evidence) -> list[str]:
    return []


@dataclass(frozen=True)
class Attack:
    number: int
    name: str
    needs: Needs
    how: str
    must: str
    strike: Callable[[Target, Over], Seen]
    """Goes on until it is over, and comes back within seconds then."""
    judge: Callable[[Evidence], list[str]] = _nothing
    """What is wrong beside the common rules, in words."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of the shard, where the usual ones do not do."""
    seconds: float = 2.0
    """It goes on for at least so long."""
    learners: int = 1
    """Honest ones."""
    fresh: bool = False
    """The attacker comes first, and the honest learners afterwards."""
    late: bool = False
    """Another honest learner comes while the attack is on."""
    restart: bool = False
    """The shard is killed and started again from its data folder afterwards."""

    def problems(self, found: Evidence) -> list[str]:
        """Everything that is not as it must be; empty: the attack has failed."""
        return [*self.judge(found), *_common(found)]


def _common(found: Evidence) -> list[str]:
    """What holds for all attacks: nobody honest is hurt, and memory and log are bounded."""
    tried = found.seen.answers or found.seen.facts
    problems = [
        words
        for is_wrong, words in (
            (found.seen.error, f"the attack broke down:\n{found.seen.error}"),
            (not found.seen.error and not tried, "nothing was tried"),
            (found.shard_ended, "the shard has ended"),
            (found.restarted, f"the shard cannot be started again: {found.restarted}"),
            (found.rss_more > RSS_MORE, f"RSS + {found.rss_more / 2**20:.0f} MiB"),
            (found.tracebacks, f"{found.tracebacks} tracebacks in the log"),
            (found.lines > MOST_LINES, f"{found.lines} lines of log"),
            (found.seen.without_code, f"{found.seen.without_code} calls without a stable code"),
            (found.late, f"a learner that comes later: {found.late}"),
            (found.status.get("done"), "the run has ended"),
        )
        if is_wrong
    ]
    if found.after is None and found.before is not None:
        problems.append("the honest learner's process has ended")
    elif found.after is not None and found.after.stopped:
        problems.append(f"the honest learner stopped: {found.after.stopped}")
    elif not found.went_on:
        problems.append("the honest learner's work is merged no longer")
    elif found.kept_up < KEPT_UP_MIN:
        problems.append(f"rounds at {found.kept_up:.0%} of their rate")
    return problems
