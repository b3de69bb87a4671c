"""The messages between learners and shards, as plain values.

The pure cores use these. `protobuf.py` converts them to messages of diloco.v1 and back. The meaning of each field is
documented once, in protos/diloco_protos/parameter_server.proto. Optional fields that are absent there are None here.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from diloco_common.errors import BadRequest, Unavailable
from diloco_common.wire.manifest import TensorSpec, Tie

if TYPE_CHECKING:
    from diloco_common.codec import PayloadHeader  # imports torch, which readers of messages need not


class Range(NamedTuple):
    """Elements start to stop - 1 of a flat fragment. A tuple, because callers send many."""

    start: int
    stop: int


def check_ranges(what: str, ranges: Sequence[Range]) -> None:
    """Check that they ascend, are disjoint and not empty; they may touch. Raises BadRequest."""
    for start, stop in ranges:
        if start >= stop:
            raise BadRequest(f"{what} has a range from {start} to {stop}, which is empty; leave it out")
    for before, after in itertools.pairwise(ranges):
        if before.stop > after.start:
            raise BadRequest(
                f"{what} has a range from {after.start} after one that ends at {before.stop}; "
                "ranges must ascend and be disjoint"
            )


PROTOCOL = 3
"""3: every learner carries, with error feedback. 2: a checksum per chunk, parts and ranges, chunks of up to 4 MiB.
Others are refused (PROTOCOL_MISMATCH)."""
TRANSFERS_AT_ONCE = 4
"""Maximum number of pushes, and of pulls, of one learner at one shard. More on a thin link are too slow to finish."""


class VersionId(NamedTuple):
    """Identifies the bytes of a fragment forever."""

    epoch: int
    """In which the version was made."""
    version: int
    """Its number of outer steps."""


LINE = 10**10
"""An epoch is seconds since 1970 (or drawn below that) plus this for each promotion of a standby. So every epoch of a
promoted shard is above all epochs of the shard that it replaced, whenever that one is started again."""


def check_no_way_back(answer: JoinAnswer, seen: int) -> None:
    """Refuse an epoch from before a known promotion, unless the folder may have been emptied. Raises Unavailable."""
    epoch, is_newer = answer.epoch, answer.began_with_nothing and answer.epoch % LINE > seen % LINE
    if epoch // LINE < seen // LINE and not is_newer:
        raise Unavailable(
            f"this is epoch {epoch} of the shard, from before its standby was promoted (epoch {seen}); end it, and "
            "give the address of the promoted one"
        )


@dataclass(frozen=True, slots=True)
class ShardAway:
    address: str
    index: int | None
    for_s: float


ADAM, OTHER = "adam", "other"


@dataclass(frozen=True, slots=True)
class Progress:
    """A learner's report after an inner step; also its heartbeat."""

    inner_step: int
    tokens: int
    loss: float | None = None
    step_time_s: float = 0.0
    away: tuple[ShardAway, ...] = ()
    counts_samples: bool = False
    last_rounds: frozenset[int] | None = None
    """Set before leaving: fragments with work that is neither in a version nor in a contribution in flight."""
    inner: str = ""
    """Type of its optimizer: ADAM (Adam and similar), OTHER; empty: unknown."""
    pushes_fail_why: str = ""
    """Why pushes to this shard fail; empty: they do not."""
    pushes_fail_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Collect:
    """Snapshot the fragment at the next step boundary and push it for this round."""

    fragment_id: int
    round: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A new version is ready to be pulled."""

    fragment_id: int
    version: int
    epoch: int
    near: Near | None = None
    """Where to get these bytes from a mirror."""


@dataclass(frozen=True, slots=True)
class Near:
    """A mirror's copy of a version, and how to check its bytes."""

    address: str
    """The mirror's; empty: no mirror."""
    values_sha256: bytes
    change_sha256: bytes
    """Empty: there is no change."""
    header: PullHeader
    """The shard's own header of the version."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """The shard is alive, and this is the state of the run."""

    tokens_merged: int
    tokens_budget: int
    learners_alive: int = 0


@dataclass(frozen=True, slots=True)
class Drain:
    """The shard is shutting down; it will be back."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The token budget is reached."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """The lease is over. The code says why."""

    code: str
    message: str


Directive = Collect | Committed | Pulse | Drain | Stop | Evicted


@dataclass(frozen=True, slots=True)
class LearnerPolicy:
    """Settings that must be equal for all learners of a run. The shards hold them."""

    sync_every: int
    push_encoding: str
    pull_encoding: str


@dataclass(frozen=True, slots=True)
class FragmentStatus:
    """The state of one fragment on its shard, as told to one learner."""

    fragment_id: int
    seeded: bool
    version: int
    merged_version: int
    epoch: int
    forgotten_version: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    fragment_id: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """A frozen parameter or buffer of a learner's model, which must be the same everywhere."""

    name: str
    form: str
    crc32c: int | None
    values: bytes = b""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A process asks for a lease. An observer asks for a description of the run, without a lease."""

    protocol: int
    process_id: str
    tensors: tuple[TensorSpec, ...] = ()
    decodes: tuple[str, ...] = ()
    held: tuple[Held, ...] = ()
    observe: bool = False
    frozen: tuple[FrozenTensor, ...] = ()
    ties: tuple[Tie, ...] = ()
    index: int | None = None
    age_s: float = 0.0
    tokens_seen: int = 0
    site: str = ""


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """A lease, and everything the learner needs to know about the run."""

    generation: int
    epoch: int
    heartbeat_s: float
    shard_index: int
    num_shards: int
    num_fragments: int
    manifest_digest: str
    policy: LearnerPolicy
    fragments: tuple[FragmentStatus, ...]
    pulse: Pulse
    tensors: tuple[TensorSpec, ...] = ()
    ties: tuple[Tie, ...] = ()
    index: int = 0
    rules: str = ""
    frozen: tuple[FrozenTensor, ...] = ()
    began_with_nothing: bool = False


AVERAGE = "average"
"""Used instead of an encoding in a Pull: the average of the versions, sent as float32."""
FILE, FILE_CHUNK = "version-file", 4 << 20
"""Likewise: the version file as on the shard's disk, and the size of its chunks in bytes."""


class Role(StrEnum):
    OBSERVER = "observer"  # reads
    MIRROR = "mirror"  # holds what was announced, for others
    STANDBY = "standby"  # holds the version files


@dataclass(frozen=True, slots=True)
class FollowRequest:
    """A reader asks for what is announced."""

    role: str
    site: str = ""
    address: str = ""
    epoch: int = 0
    """For a promoted standby: its own epoch."""
    tokens_merged: int = 0


@dataclass(frozen=True, slots=True)
class PullRequest:
    fragment_id: int
    encodings: tuple[str, ...] = ()
    have: tuple[int, int] | None = None
    """Epoch and number of the caller's version."""
    want: tuple[int, int] | None = None
    """Epoch and number of the version to send; None: the latest."""
    ranges: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class PullHeader:
    """Announces a version before its bytes."""

    fragment_id: int
    version: int
    epoch: int
    merged_version: int
    forgotten_version: int
    tokens_merged: int
    payload: PayloadHeader | None
    base_version: int | None = None
    ranges: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class PushHeader:
    """Announces a contribution, or a seed (round 0), before its bytes."""

    fragment_id: int
    round: int
    epoch: int
    base_version: int
    tokens: int
    steps: int
    payload: PayloadHeader
    manifest_digest: str
    tokens_merged: int = 0
    not_finite: bool = False
    part: int = 0
    num_parts: int = 1
    ranges: tuple[Range, ...] = ()

    @property
    def is_seed(self) -> bool:
        return self.round == 0


class Outcome(Enum):
    """What became of a push."""

    ACCEPTED = "accepted"  # held until the round closes
    DUPLICATE = "duplicate"  # the same contribution was accepted before
    LATE = "late"  # the round has closed; carry the work into the next one
    REJECTED = "rejected"  # refused; `PushAnswer.code` says why


@dataclass(frozen=True, slots=True)
class PushAnswer:
    """The outcome of a push. A rejection has a stable code and a message."""

    outcome: Outcome
    code: str = ""
    message: str = ""


T = TypeVar("T")


class Newest(Generic[T]):
    """A queue that keeps only the newest word of each kind about each thing, so the number of things bounds it.

    A thing keeps its turn even if newer words about it arrive, so none is passed over forever. The words about a thing
    come together, in the order in which they were said.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[object, dict[object, T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, about: object, kind: object, word: T) -> None:
        """Add a word in place of the earlier one of its kind about the same thing."""
        words = self._waiting.setdefault(about, {})
        words.pop(kind, None)
        words[kind] = word

    def drop(self, about: object) -> None:
        self._waiting.pop(about, None)

    def take(self) -> T:
        about, words = next(iter(self._waiting.items()))
        word = words.pop(next(iter(words)))
        if not words:
            del self._waiting[about]
        return word
