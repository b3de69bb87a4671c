"""Every error that leaves a process. Each has its own class.

The class name in capitals is its stable code (WrongRun: WRONG_RUN), and its docstring is the meaning of the code.
`diloco explain`, docs/errors.md, the gRPC status of an answer and the exit code of a command are derived from the
class. The message of an error says what happened this time. Texts are Markdown; links are relative to docs/.
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeVar

EXIT_OK, EXIT_UNEXPECTED, EXIT_USAGE, EXIT_DATA, EXIT_IN_USE, EXIT_CANNOT_CONNECT, EXIT_REFUSED = range(7)
"""USAGE: the command line or the configuration. DATA: data or a checkpoint."""
EXIT_INTERRUPTED, EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
COMMANDS = "commands and training loops"
CALLS = "refused calls"
CONTRIBUTIONS = "rejected contributions"
CONNECTING = "connecting"
FOLDERS = "data folders of shards"
CHECKPOINTS = "checkpoints"


E = TypeVar("E", bound="DilocoError")


class DilocoError(Exception):
    """Base of all errors that a user sees as one line, without a traceback."""

    code: ClassVar[str] = "UNEXPECTED"
    """It is sent to other processes, and never changes. By default it is the class name in capitals."""
    exit_code: ClassVar[int] = EXIT_UNEXPECTED
    """Exit code of a command that ends with this error."""
    met: ClassVar[str] = COMMANDS
    """Where people see it."""
    also: ClassVar[str] = ""
    """Another such place."""
    do: ClassVar[str] = ""
    look: ClassVar[str] = ""
    """What to look at first: a setting, a file, a figure; empty if `do` or the message says it."""
    is_logged: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.code = vars(cls).get("code", re.sub(r"\B(?=[A-Z])", "_", cls.__name__).upper())


class ConfigError(DilocoError):
    """The command line, a file or the environment is wrong."""

    code = "BAD_CONFIG"
    exit_code = EXIT_USAGE
    do = "Correct what the message names."
    look = "the message"


class SecretExposed(ConfigError):
    """Another user owns a file with a secret, or can read or write it."""

    do = "Run the command in the message."
    look = "[files](security.md#files)"


class WrongCall(ConfigError):
    """A script makes a wrong call, or calls after the learner has left, or from a child process."""

    do = "Call it as the message says."
    look = "[Python](api.md), [children](bring-your-loop.md#children-of-a-learner)"


class UnsupportedModel(DilocoError):
    """The model cannot be synchronized as it is."""

    exit_code = EXIT_USAGE
    do = "Do what the message says."
    look = "[own loop](bring-your-loop.md), [islands](islands.md)"


class ModelChanged(DilocoError):
    """Parameters were replaced, added, removed, frozen, unfrozen or overwritten after `join`."""

    exit_code = EXIT_USAGE
    do = (
        "Load and convert the model before `join`. Later use `learner.values(...)` or `learner.restore(...)`. List the "
        "layers that you freeze or unfreeze: `shared=`."
    )
    look = "[own loop](bring-your-loop.md#layers-that-are-frozen-and-unfrozen)"


class VersionUndone(DilocoError):
    """Steps undo versions: the optimizer writes its own copy of the weights over them, or the loop clamps."""

    exit_code = EXIT_USAGE
    is_logged = True
    do = "Say where the copies are: `join(masters=...)`. If the loop clamps: `join(after_version=...)`."
    look = "[own loop](bring-your-loop.md#optimizers-with-weights-of-their-own)"


class OptimizerDiffers(UnsupportedModel):
    """The optimizer does not train what is shared: a target network, a head in the loss."""

    exit_code = EXIT_USAGE
    is_logged = True
    do = "Keep what no optimizer trains local (`private=`), and join what it trains: `join([model, loss])`."
    look = "[own loop](bring-your-loop.md#what-the-optimizer-trains)"


class ForkUnsafe(DilocoError):
    """gRPC was imported before diloco_worker, or its fork support is on: forked children would crash."""

    exit_code = EXIT_USAGE
    do = "Import `diloco_worker` first, or set `GRPC_ENABLE_FORK_SUPPORT=0` before the start."
    look = "[children](bring-your-loop.md#children-of-a-learner)"


class DataError(DilocoError):
    """Training data or a file of weights is missing or damaged."""

    code = "BAD_DATA"
    exit_code = EXIT_DATA
    do = "Correct the path."
    look = "the path in the message"


class InUse(DilocoError):
    """A port, a folder or a learner id belongs to another process."""

    exit_code = EXIT_IN_USE
    do = "End that process, or choose another."
    look = "the message"


class IslandBroken(DilocoError):
    """A rank of an [island](islands.md) has ended, or ranks do not call `step` and `poll` alike."""

    do = "Restart all ranks (`torchrun --max-restarts`)."
    look = "the log of the rank that ended first"


class CannotConnect(DilocoError):
    """No shard or object store answers at the address."""

    exit_code = EXIT_CANNOT_CONNECT
    met = CONNECTING
    do = "Start the shards, or correct the address (or the credentials of the object store)."
    look = "`diloco doctor --shards HOST:PORT` on the caller's machine"


class Unavailable(DilocoError):
    """A call broke or took too long."""

    met = CONNECTING
    do = "Nothing: the caller retries."
    look = "the link, if it happens often"

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        """`is_refused`: no process listens there."""
        super().__init__(message)
        self.is_refused = is_refused


class HandshakeFailed(Unavailable):
    """TLS failed."""

    exit_code = EXIT_CANNOT_CONNECT
    do = "Do what the message says."
    look = "`diloco doctor --shards HOST:PORT --tls FOLDER`"


class ForeignCertificate(HandshakeFailed):
    """One side has no certificate, or one that the other side's CA did not issue."""

    do = "Give both sides folders that one authority issued (`diloco certs issue`)."
    look = "`ca.pem` on both sides: they must be equal; `cert.pem` and `key.pem` beside it"


class CertificateNotValid(HandshakeFailed):
    """A certificate has expired or is not valid yet, or this machine's clock is wrong."""

    do = "Set the clock, or issue another one: no restart is needed."
    look = "`date -u` on both machines"


class WrongHost(HandshakeFailed):
    """The shard's certificate is not for the name that was dialed."""

    do = "Dial a name in it, or issue it again with `--host`."
    look = "the names in the message"


class TlsMismatch(HandshakeFailed):
    """One side speaks TLS, and the other plaintext."""

    do = "Set `security.tls` (`tls=` of join) on both sides or on neither."
    look = "`security.tls` on both sides"


class NotAShard(HandshakeFailed):
    """The process on that port does not speak our protocol."""

    do = "Use the gRPC port (`shard.listen`, usually 50051), not the HTTP port (`shard.http`)."
    look = "`serving` in the shard's log"


class BadCheckpoint(DataError):
    """The checkpoint does not exist, is damaged, lacks fragments, mixes parts of different runs, models or times, or
    its name is taken."""

    met = CHECKPOINTS
    do = "Name the parts of one whole checkpoint, choose another name, or take another checkpoint."
    look = "`diloco checkpoint verify`"


class WrongFolder(DataError):
    """The folder belongs to another run, shard or model."""

    met = FOLDERS
    do = "Give the shard its own folder."
    look = "`shard.data_dir`, `shard.index`, `run.id`"


class NothingIntact(DataError):
    """A fragment has files, but all are damaged."""

    met = FOLDERS
    do = "Restore a checkpoint, or delete the files: learners then seed the fragment again."
    look = "the disk; [version file](version-file.md)"


class VersionDamaged(DataError):
    """A file is damaged. The shard uses the version before it; a damaged checkpoint is not restored."""

    met = FOLDERS
    is_logged = True
    do = "Check the disk. Take another checkpoint."
    look = "the disk's own log (`dmesg`)"

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} is damaged: {why}")
        self.name, self.why = name, why


WORDS_MAX = 2000
"""Maximum size in bytes of a refusal's text. The text may quote a caller; statuses, answers and logs contain it."""


def plain(words: str) -> str:
    """Text as one line of at most `WORDS_MAX` bytes of UTF-8: control characters are escaped, and the rest is cut."""
    words = words[: WORDS_MAX + 1]  # escaping never shortens
    line = words if words.isprintable() else "".join(map(_escaped, words))
    if len(line.encode()) <= WORDS_MAX:
        return line
    return line.encode()[: WORDS_MAX - 3].decode(errors="ignore") + "…"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class Refusal(DilocoError):
    """A newer shard refused the call with a code that is unknown here."""

    code = "REFUSED"
    exit_code = EXIT_REFUSED
    met = CALLS
    do = "Install equal versions."
    look = "`diloco --version` on both machines"

    status: ClassVar[str] = "UNKNOWN"
    """Name of the gRPC status of a call that ends with this error; FAILED_PRECONDITION by default."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.status = vars(cls).get("status", "FAILED_PRECONDITION")

    def __init__(self, words: str) -> None:
        super().__init__(plain(words))


class Unauthenticated(Refusal):
    """The call has no valid certificate or token."""

    status = "UNAUTHENTICATED"
    do = "Give the caller what the shard requires."
    look = "`security.token_file` (`token=` of join) on both sides"


class WrongIdentity(Refusal):
    """The certificate names another caller or run, or its scope does not allow this call."""

    status = "PERMISSION_DENIED"
    do = "Use the caller's own certificate, with the right scope."
    look = "`worker.learner_id`, `run.id`, and whom `cert.pem` names; [who may call](deploy.md#who-may-call)"


class Revoked(Refusal):
    """The certificate is on the deny-list."""

    status = "UNAUTHENTICATED"
    do = "Ask the operator of the run for another one."
    look = "`diloco certs list`, where the authority is"


class Expired(Refusal):
    """The certificate has expired."""

    status = "UNAUTHENTICATED"
    do = "Issue another one: no restart is needed."
    look = "`diloco certs list`; both clocks"


class BadRequest(Refusal):
    """The call violates the protocol or a [limit](wire-format.md#limits)."""

    status = "INVALID_ARGUMENT"
    do = "Install equal versions. If they are equal, file an issue."
    look = "the message"


class ProtocolMismatch(Refusal):
    """Caller and shard speak different versions of the protocol."""

    do = "Install equal versions."
    look = "`diloco --version` on both machines"


class WrongRun(Refusal):
    """The shard belongs to another run."""

    do = "Correct the run's id, or the addresses."
    look = "`run.id` on both sides, `worker.shards`"


class ManifestMismatch(Refusal):
    """The model is not that of the run, or is cut differently."""

    do = "Start every worker with the same model and code."
    look = "the differences in the message; `run.model`, `sync.fragments`"
    also = CONTRIBUTIONS


class FrozenMismatch(Refusal):
    """Frozen parameters or packed quantized weights differ from those of the run."""

    do = (
        'Load the same base in the same dtype, or use `frozen="any"`. If your loop changes them, `private=[...]` keeps '
        'them local, and `shared="all"` merges them.'
    )
    look = "the base model of each worker"


class NotJoined(Refusal):
    """The learner has no lease here, or the shard has restarted."""

    do = "Nothing: the learner joins again."


class LeaseExpired(Refusal):
    """The learner was silent for longer than its lease."""

    do = "Nothing: the learner joins again. If this happens often, raise `lease.lease_s`."
    look = "`lease.lease_s`, the link"


class StaleGeneration(Refusal):
    """The call comes from an earlier process of the learner."""

    do = "Nothing."

    def __init__(self, learner_id: str, got: int, current: int) -> None:
        super().__init__(f"{learner_id}: generation {got} is over, {current} is current")


class Superseded(Refusal):
    """Another process has joined with the same learner id, or replaced this shard. This process ends."""

    exit_code = EXIT_IN_USE
    do = "Give each worker its own id. A shard whose standby was promoted stays ended."
    look = "`worker.learner_id`, [mirrors and standbys](mirrors.md)"


class Draining(Refusal):
    """The shard is shutting down."""

    status = "UNAVAILABLE"
    do = "Nothing: the caller retries."


class UnknownFragment(Refusal):
    """Another shard owns the fragment, or none does."""

    status = "NOT_FOUND"
    do = "Give workers the addresses of all shards."
    look = "`worker.shards`, `shard.count`"
    also = CONTRIBUTIONS


class VersionGone(Refusal):
    """The shard no longer holds the version that a pull names."""

    status = "NOT_FOUND"
    do = "Nothing: the learner pulls the latest."


class NoAverage(Refusal):
    """The run keeps no average of its versions."""

    do = "Set `outer.average` on all shards (such as 0.97), and restart them."
    look = "[The average of the versions](checkpoints.md#the-average-of-the-versions)"


class NotSeeded(Refusal):
    """The fragment has no version yet."""

    do = "Nothing: the caller retries."
    also = CONTRIBUTIONS


class WrongEpoch(Refusal):
    """It is based on a version that the shard lost."""

    met = CONTRIBUTIONS
    do = "Nothing: the learner pulls first."
    look = "[DilocoVersionsLost](runbook.md#dilocoversionslost)"


class WrongRound(Refusal):
    """The round is not open, or did not ask this learner."""

    met = CONTRIBUTIONS
    do = "Nothing: the work is carried."


class TooStale(Refusal):
    """It is based on a version older than `sync.staleness_max`."""

    met = CONTRIBUTIONS
    do = "Nothing: the work is carried. If this happens often, raise `sync.sync_every` or `sync.staleness_max`."
    look = "[DilocoStalenessHigh](runbook.md#dilocostalenesshigh)"


class BadPayload(Refusal):
    """Sizes or bytes do not fit the fragment, the encoding or the header."""

    status = "INVALID_ARGUMENT"
    met = CONTRIBUTIONS
    do = "Install equal versions."
    look = "`diloco --version` on both machines"


class BadChecksum(Refusal):
    """The bytes changed on the way."""

    status = "DATA_LOSS"
    met = CONTRIBUTIONS
    do = "Nothing: the caller retries. If this persists, a machine or link damages bytes."
    look = "memory and network of the learner's machine"


class TornUpload(Refusal):
    """A push stopped, was too slow, or a later one replaced it."""

    status = "UNAVAILABLE"
    do = "Nothing: the caller retries. If this persists, the link is too thin."
    look = "the learner's link, and what else uses it"


class ContributionConflict(Refusal):
    """The same contribution came before with other bytes."""

    status = "ALREADY_EXISTS"
    met = CONTRIBUTIONS
    do = "Give each worker its own id. Otherwise file an issue."
    look = "`worker.learner_id`"


class UnknownEncoding(Refusal):
    """The run does not use this encoding."""

    status = "INVALID_ARGUMENT"
    do = "Install it on the caller's machine, or change the setting."
    look = "`sync.push`, `sync.pull`, installed plugins"
    also = CONTRIBUTIONS


class NotFinite(Refusal):
    """A value is NaN, infinite, or so large that its square overflows."""

    status = "INVALID_ARGUMENT"
    met = CONTRIBUTIONS
    do = "If the learner has diverged, restart it with a new optimizer."
    look = "the learner's loss and memory"
    also = "ends a learner after five rounds in a row"


class Busy(Refusal):
    """Too many pushes, pulls, joins, learners or bytes at once."""

    status = "RESOURCE_EXHAUSTED"
    do = "Nothing: the caller retries. If this persists, raise the limit in the message."
    look = "[limits](operations.md#limits)"


def refusal_from(code: str, message: str) -> Refusal:
    return _with_words(next((kind for kind in Refusal.__subclasses__() if kind.code == code), Refusal), message)


def error_from(code: str, message: str) -> DilocoError:
    """The error of any kind with this stable code."""
    return _with_words(next((kind for kind in all_kinds() if kind.code == code), DilocoError), message)


def all_kinds() -> list[type[DilocoError]]:
    kinds = [DilocoError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [kind for kind in kinds if kind.__module__ == __name__]


def _with_words(kind: type[E], message: str) -> E:
    """An error with exactly this message. The constructors of some kinds build the message from facts: skip them."""
    error = kind.__new__(kind)
    Exception.__init__(error, plain(message))
    return error


def one_line(error: DilocoError, name: str) -> str:
    """The error as people see it: `name: message [CODE]`, with the code after the last line."""
    lines = str(error).splitlines() or ["failed"]
    return "\n".join(f"{name}: {line}" for line in lines) + f" [{error.code}]"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest known word, as the end of a message; empty if none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.65)
    return f"; did you mean {close[0]}?" if close else ""


def some(found: Sequence[str], between: str = ", ") -> str:
    """The first three of these, and how many more there are."""
    more = f"{'' if between == ', ' else between.rstrip()} and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{between.join(found[:3])}{more}"


def shown(value: object) -> str:
    """A value as messages quote it: the value itself if it is short and plain, else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}, not an instance"
    is_plain = value is None or isinstance(value, bool | int | float | str | list | tuple | dict | set)
    words = repr(value) if is_plain else ""
    return words if is_plain and len(words) <= 60 and words.isprintable() else f"of type {type(value).__name__}"
