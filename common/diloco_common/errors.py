"""Every error that leaves a process, with its stable code.

An error knows its facts and says what happened, why, and what to do. A shard answers a caller with a `Refusal`; one
table in `rpc.py` gives the gRPC status of each code. A command ends with the `exit_code` of its error.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

EXIT_OK = 0
EXIT_UNEXPECTED = 1
EXIT_USAGE = 2  # the command line or the configuration
EXIT_DATA = 3  # data or a checkpoint
EXIT_IN_USE = 4
EXIT_CANNOT_CONNECT = 5
EXIT_REFUSED = 6
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


E = TypeVar("E", bound="DilocoError")


class DilocoError(Exception):
    """Base of all errors that a user sees as one line, without a traceback."""

    code: ClassVar[str] = "UNEXPECTED"
    exit_code: ClassVar[int] = EXIT_UNEXPECTED


class ConfigError(DilocoError):
    """The command line, a configuration file or an environment variable is wrong."""

    code = "BAD_CONFIG"
    exit_code = EXIT_USAGE


class SecretExposed(ConfigError):
    """Others can read a file with a secret, or could have written it."""

    code = "SECRET_EXPOSED"


class WrongCall(ConfigError):
    """A training script calls a function of ours in a way that it cannot be called."""

    code = "WRONG_CALL"


class UnsupportedModel(DilocoError):
    """The user's model cannot be synchronised in its present form."""

    code = "UNSUPPORTED_MODEL"
    exit_code = EXIT_USAGE


class ModelChanged(DilocoError):
    """The model is no longer the one that joined: its parameters were replaced or overwritten."""

    code = "MODEL_CHANGED"
    exit_code = EXIT_USAGE


class VersionUndone(DilocoError):
    """The optimizer takes back every version: it writes a copy of the weights over the parameters."""

    code = "VERSION_UNDONE"
    exit_code = EXIT_USAGE


class LearnerEnded(DilocoError):
    """The learner has left the run, and is asked to go on."""

    code = "LEARNER_ENDED"
    exit_code = EXIT_USAGE


class ChildOfLearner(DilocoError):
    """A child of a learner's process calls what only its parent may, or joins in the parent's place."""

    code = "CHILD_OF_LEARNER"
    exit_code = EXIT_USAGE


class ForkUnsafe(DilocoError):
    """A fork whose child may die by gRPC's fault: its fork handlers could not be turned off."""

    code = "FORK_UNSAFE"
    exit_code = EXIT_USAGE


class DataError(DilocoError):
    """Training data or a checkpoint is missing or damaged."""

    code = "BAD_DATA"
    exit_code = EXIT_DATA


class NoCheckpoint(DataError):
    """There is no checkpoint in the given place."""

    code = "NO_CHECKPOINT"


class InUse(DilocoError):
    """A port, a folder or a learner id belongs to another process."""

    code = "IN_USE"
    exit_code = EXIT_IN_USE


class IslandBroken(DilocoError):
    """Ranks of an island have ended, or do not go in step."""

    code = "ISLAND_BROKEN"


class CannotConnect(DilocoError):
    """No server answers at the given address."""

    code = "CANNOT_CONNECT"
    exit_code = EXIT_CANNOT_CONNECT


class Unavailable(DilocoError):
    """A call or a stream broke, or took too long. Its outcome is unknown."""

    code = "UNAVAILABLE"

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        """`is_refused`: nobody listens there."""
        super().__init__(message)
        self.is_refused = is_refused


class HandshakeFailed(Unavailable):
    """No call got through, and this is why. One class per cause; `common/handshake.py` finds it."""

    code = "HANDSHAKE_FAILED"
    exit_code = EXIT_CANNOT_CONNECT


class NoCertificate(HandshakeFailed):
    """The shard asks for a certificate, and this caller has none."""

    code = "NO_CERTIFICATE"


class ForeignCertificate(HandshakeFailed):
    """One side's certificate is not of the other side's CA."""

    code = "FOREIGN_CERTIFICATE"


class CertificateExpired(HandshakeFailed):
    """A certificate is too old, or a clock is wrong."""

    code = "CERTIFICATE_EXPIRED"


class CertificateNotYetValid(HandshakeFailed):
    """A certificate begins later, so a clock is wrong."""

    code = "CERTIFICATE_NOT_YET_VALID"


class WrongHost(HandshakeFailed):
    """The shard's certificate is not for the name that was dialed."""

    code = "WRONG_HOST"


class TlsNeeded(HandshakeFailed):
    """The port speaks TLS, and this caller does not."""

    code = "TLS_NEEDED"


class NotAShard(HandshakeFailed):
    """The port speaks HTTP, not our protocol."""

    code = "NOT_A_SHARD"


class TlsNotSpoken(HandshakeFailed):
    """This caller speaks TLS, and the port does not."""

    code = "TLS_NOT_SPOKEN"


WORDS_MAX = 2000
"""Bytes of the words of a refusal. They may quote what a caller sent, and go into statuses, answers and logs."""


def plain(words: str) -> str:
    """Words as one line of at most `WORDS_MAX` bytes of UTF-8: control characters are escaped, what is over is cut."""
    words = words[: WORDS_MAX + 1]  # an escape is never shorter
    line = words if words.isprintable() else "".join(map(_escaped, words))
    if len(line.encode()) <= WORDS_MAX:
        return line
    return line.encode()[: WORDS_MAX - 3].decode(errors="ignore") + "…"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class Refusal(DilocoError):
    """A shard refuses a call. Nothing has changed; repeating the same call gives the same answer."""

    code = "REFUSED"
    exit_code = EXIT_REFUSED

    def __init__(self, words: str) -> None:
        super().__init__(plain(words))


class Unauthenticated(Refusal):
    """The certificate or the bearer token is absent or wrong."""

    code = "UNAUTHENTICATED"


class WrongIdentity(Refusal):
    """The call says it is of somebody else than its certificate or token proves."""

    code = "WRONG_IDENTITY"


class WrongScope(Refusal):
    """The caller's scope does not have this call."""

    code = "WRONG_SCOPE"


class Revoked(Refusal):
    """The caller's certificate or token is on the deny-list."""

    code = "REVOKED"


class Expired(Refusal):
    """The caller's certificate or token has expired."""

    code = "EXPIRED"


class BadRequest(Refusal):
    """The call breaks the protocol: a missing header, a malformed field."""

    code = "BAD_REQUEST"


class ProtocolMismatch(Refusal):
    """The caller speaks another version of the protocol."""

    code = "PROTOCOL_MISMATCH"


class WrongRun(Refusal):
    """The caller belongs to another run."""

    code = "WRONG_RUN"


class BadLearnerId(Refusal):
    """The learner id is not [A-Za-z0-9._-]{1,64}."""

    code = "BAD_LEARNER_ID"


class ManifestMismatch(Refusal):
    """The caller's model, or the way it is cut, differs from the shard's."""

    code = "MANIFEST_MISMATCH"


class FrozenMismatch(Refusal):
    """What the caller's model holds fixed differs from what the learners of the run hold fixed."""

    code = "FROZEN_MISMATCH"


class NotJoined(Refusal):
    """The learner has no lease here: it never joined, or the shard has restarted since."""

    code = "NOT_JOINED"


class LeaseExpired(Refusal):
    """The learner was silent for longer than its lease. It may join again."""

    code = "LEASE_EXPIRED"


class Stalled(Refusal):
    """The learner's heartbeats came, but it took no inner step for too long. It may join again."""

    code = "STALLED"


class StaleGeneration(Refusal):
    """The learner has joined again since then; this caller's generation is over."""

    code = "STALE_GENERATION"

    def __init__(self, learner_id: str, got: int, current: int) -> None:
        super().__init__(f"{learner_id}: generation {got} is over, {current} is current")


class Superseded(Refusal):
    """Another process joined with the same learner id; this one must stop."""

    code = "SUPERSEDED"
    exit_code = EXIT_IN_USE


class Draining(Refusal):
    """The shard is shutting down and takes no new work."""

    code = "DRAINING"


class UnknownFragment(Refusal):
    """The fragment does not exist or is owned by another shard."""

    code = "UNKNOWN_FRAGMENT"


class VersionGone(Refusal):
    """The shard no longer holds the version that a pull names; pull a later one."""

    code = "VERSION_GONE"


class NotSeeded(Refusal):
    """The fragment has no version yet."""

    code = "NOT_SEEDED"


class WrongEpoch(Refusal):
    """The shard was restored since then; it cannot compare versions of the caller's epoch."""

    code = "WRONG_EPOCH"


class WrongRound(Refusal):
    """The round was never opened, or its base version is impossible."""

    code = "WRONG_ROUND"


class TooStale(Refusal):
    """The base version of the contribution is too old."""

    code = "TOO_STALE"


class BadSize(Refusal):
    """Element or byte counts do not fit the fragment, the encoding, or what was announced."""

    code = "BAD_SIZE"


class BadChecksum(Refusal):
    """The bytes differ from their checksum."""

    code = "BAD_CHECKSUM"


class TornUpload(Refusal):
    """The push broke off before all of its bytes arrived. Nothing was taken; push again."""

    code = "TORN_UPLOAD"


class ContributionConflict(Refusal):
    """An earlier push with the same learner, generation, fragment and round had other bytes."""

    code = "CONTRIBUTION_CONFLICT"


class UnknownEncoding(Refusal):
    """The encoding is not in the registry, or the run uses another one."""

    code = "UNKNOWN_ENCODING"


class BadEncoding(Refusal):
    """The bytes are not a valid payload of their encoding (a scale of 0, NaN or inf, for example)."""

    code = "BAD_ENCODING"


class NotFinite(Refusal):
    """A value is NaN or infinite."""

    code = "NOT_FINITE"


class NormTooLarge(Refusal):
    """The norm is far above the usual norm of this fragment's contributions."""

    code = "NORM_TOO_LARGE"


class Quarantined(Refusal):
    """The learner's contributions were outliers again and again, so it is left out for a while."""

    code = "QUARANTINED"


class Implausible(Refusal):
    """The learner cannot have trained what it pushes, by its own reports and the shard's clock."""

    code = "IMPLAUSIBLE"


class Busy(Refusal):
    """Too many pushes are open at once; try again later."""

    code = "BUSY"


def refusal_from(code: str, message: str) -> Refusal:
    """The error with this stable code."""
    return _with_words(next((kind for kind in Refusal.__subclasses__() if kind.code == code), Refusal), message)


def error_from(code: str, message: str) -> DilocoError:
    """The error with this stable code, whatever kind it is."""
    kinds = [DilocoError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return _with_words(next((kind for kind in kinds if kind.code == code), DilocoError), message)


def _with_words(kind: type[E], message: str) -> E:
    """Some kinds make their words of facts, which the other side has put into the message already."""
    error = kind.__new__(kind)
    Exception.__init__(error, plain(message))
    return error
