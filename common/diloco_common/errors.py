"""Every error that leaves a process, with its stable code.

An error knows its facts and says what happened, why, and what to do. A shard answers a caller with a `Refusal`; one
table in `rpc.py` gives the gRPC status of each code. A command ends with the `exit_code` of its error.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_UNEXPECTED = 1
EXIT_USAGE = 2  # the command line or the configuration
EXIT_DATA = 3  # data or a checkpoint
EXIT_IN_USE = 4
EXIT_CANNOT_CONNECT = 5
EXIT_REFUSED = 6
EXIT_INTERRUPTED = 130


class DilocoError(Exception):
    """Base of all errors that a user sees as one line, without a traceback."""

    code: ClassVar[str] = "UNEXPECTED"
    exit_code: ClassVar[int] = EXIT_UNEXPECTED


class ConfigError(DilocoError):
    """The command line, a configuration file or an environment variable is wrong."""

    code = "BAD_CONFIG"
    exit_code = EXIT_USAGE


class UnsupportedModel(DilocoError):
    """The user's model cannot be synchronised in its present form."""

    code = "UNSUPPORTED_MODEL"
    exit_code = EXIT_USAGE


class DataError(DilocoError):
    """Training data or a checkpoint is missing or damaged."""

    code = "BAD_DATA"
    exit_code = EXIT_DATA


class InUse(DilocoError):
    """A port, a folder or a learner id belongs to another process."""

    code = "IN_USE"
    exit_code = EXIT_IN_USE


class CannotConnect(DilocoError):
    """No server answers at the given address."""

    code = "CANNOT_CONNECT"
    exit_code = EXIT_CANNOT_CONNECT


class Refusal(DilocoError):
    """A shard refuses a call. Nothing has changed; repeating the same call gives the same answer."""

    code = "REFUSED"
    exit_code = EXIT_REFUSED


class Unauthenticated(Refusal):
    """The bearer token is absent or wrong."""

    code = "UNAUTHENTICATED"


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
    """The bytes differ from what the header announced."""

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


class Busy(Refusal):
    """Too many pushes are open at once; try again later."""

    code = "BUSY"


def refusal_from(code: str, message: str) -> Refusal:
    """The error with this stable code."""
    kind = next((kind for kind in Refusal.__subclasses__() if kind.code == code), Refusal)
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error
