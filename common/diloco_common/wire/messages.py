"""The messages between learners and shards, as plain values.

The pure cores use these values. `protobuf.py` converts them to messages of diloco.v1 and back, and refuses a value
beyond the limit in its annotation. protos/diloco_protos/parameter_server.proto documents the meaning of each field.
Optional fields that are absent there are None here.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Annotated, Generic, NamedTuple, TypeAlias, TypeVar

from diloco_common.errors import WORDS_MAX, BadRequest, Unavailable
from diloco_common.wire.bounds import (
    AWAY_MAX,
    ELEMENTS_MAX,
    FRAGMENTS,
    FRAGMENTS_MAX,
    FROZEN_BYTES_MAX,
    FROZEN_MAX,
    PARTS_MAX,
    RANGES_MAX,
    RULES_MAX,
    STEPS_MAX,
    TENSORS,
    TIES_MAX,
    TOKENS_COUNTED_MAX,
    TOKENS_MAX,
    VERSION_MAX,
    Address,
    Exact,
    FieldLimit,
    FragmentId,
    Name,
    Seconds,
    Sha256,
    TensorName,
    TokensMerged,
    Uint32,
    Version,
)
from diloco_common.wire.manifest import TensorSpec, Tie

if TYPE_CHECKING:
    from diloco_common.codec import PayloadHeader  # imports torch, which readers of messages do not need


class Range(NamedTuple):
    """Elements start to stop - 1 of a flat fragment. A tuple, because callers send many."""

    start: Annotated[int, FieldLimit(ELEMENTS_MAX - 1)]
    stop: Annotated[int, FieldLimit(ELEMENTS_MAX, 1)]


Ranges: TypeAlias = Annotated[tuple[Range, ...], FieldLimit(RANGES_MAX, counts="entries")]
Ties: TypeAlias = Annotated[tuple[Tie, ...], FieldLimit(TIES_MAX, counts="entries")]


def check_ranges(what: str, ranges: Sequence[Range]) -> None:
    """Check that the ranges ascend, are disjoint and not empty; they may touch. Raises BadRequest."""
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
Shards refuse other versions (PROTOCOL_MISMATCH)."""
TRANSFERS_AT_ONCE = 4
"""Maximum number of pushes, and of pulls, of one learner at one shard. On a thin link, more are too slow to finish."""


class VersionId(NamedTuple):
    """Identifies the bytes of a fragment forever."""

    epoch: int
    """The epoch in which the version was made."""
    version: int
    """Its number of outer steps."""


LINE = 10**10
"""An epoch is seconds since 1970 (or a random number below that) plus this for each promotion of a standby. So every
epoch of a promoted shard is above all epochs of the shard that it replaced, whenever that shard starts again."""


def check_no_way_back(answer: JoinAnswer, seen: int) -> None:
    """Refuse an epoch from before a known promotion, unless the folder may have been emptied. Raises Unavailable."""
    epoch, is_newer = answer.epoch, answer.began_with_nothing and answer.epoch % LINE > seen % LINE
    if epoch // LINE < seen // LINE and not is_newer:
        raise Unavailable(
            f"this shard has epoch {epoch}, from before its standby was promoted (epoch {seen}); end it, and "
            "give the address of the promoted one"
        )


@dataclass(frozen=True, slots=True)
class ShardAway:
    address: Address
    index: FragmentId | None
    for_s: Seconds


ADAM, OTHER = "adam", "other"


@dataclass(frozen=True, slots=True)
class Leaving:
    """The `Progress.last_rounds` of a learner that leaves."""

    fragment_ids: Annotated[tuple[FragmentId, ...], FRAGMENTS]


@dataclass(frozen=True, slots=True)
class Progress:
    """A learner's report after an inner step; also its heartbeat."""

    inner_step: Annotated[int, FieldLimit(2**48)]
    tokens: Exact
    loss: Annotated[float, FieldLimit(1e30, -1e30, is_dropped=True)] | None = None
    step_time_s: Seconds = 0.0
    away: Annotated[tuple[ShardAway, ...], FieldLimit(AWAY_MAX, counts="entries")] = ()
    counts_samples: bool = False
    last_rounds: frozenset[int] | None = None
    """Set before leaving: fragments with work that is neither in a version nor in a contribution in flight."""
    inner: Name = ""
    """Type of its optimizer: ADAM (Adam and similar), OTHER; empty: unknown."""
    pushes_fail_why: Annotated[str, FieldLimit(WORDS_MAX, counts="characters")] = ""
    """Why pushes to this shard fail; empty: they do not."""
    pushes_fail_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Collect:
    """Snapshot the fragment at the next step boundary and push it for this round."""

    fragment_id: FragmentId
    round: Annotated[int, FieldLimit(VERSION_MAX, 1)]
    epoch: Exact


@dataclass(frozen=True, slots=True)
class Committed:
    """A new version is ready to be pulled."""

    fragment_id: FragmentId
    version: Version
    epoch: Exact
    near: Near | None = None
    """Where to get these bytes from a mirror."""


@dataclass(frozen=True, slots=True)
class Near:
    """A mirror's copy of a version, and how to check its bytes."""

    address: Address
    """The mirror's address; empty: there is no mirror."""
    values_sha256: Sha256
    change_sha256: Sha256
    """Empty: there is no change."""
    header: PullHeader
    """The shard's own header of the version."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """The shard is alive, and this is the state of the run."""

    tokens_merged: TokensMerged
    tokens_budget: TokensMerged
    learners_alive: Uint32 = 0


@dataclass(frozen=True, slots=True)
class Drain:
    """The shard is shutting down; it will be back."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The token budget is reached."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """The lease is over. The code says why."""

    code: Name
    message: str


Directive = Collect | Committed | Pulse | Drain | Stop | Evicted


@dataclass(frozen=True, slots=True)
class LearnerPolicy:
    """Settings that must be equal for all learners of a run. The shards hold them."""

    sync_every: Annotated[int, FieldLimit(2**31, 1)]
    push_encoding: Name
    pull_encoding: Name


@dataclass(frozen=True, slots=True)
class FragmentStatus:
    """The state of one fragment on its shard, as the shard tells it to one learner."""

    fragment_id: FragmentId
    seeded: bool
    version: Version
    merged_version: Version
    epoch: Exact
    forgotten_version: Version = 0


@dataclass(frozen=True, slots=True)
class Held:
    fragment_id: FragmentId
    epoch: Exact
    version: Version


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """A frozen parameter or buffer of a learner's model, which must be the same everywhere."""

    name: TensorName
    form: TensorName
    crc32c: Uint32 | None
    values: Annotated[bytes, FieldLimit(FROZEN_BYTES_MAX, counts="bytes")] = b""


OfferedCodec: TypeAlias = Annotated[str, FieldLimit(96, counts="characters")]
"""NAME, or NAME@DIGEST. A plugin is offered in both forms, even if no run uses it."""
FrozenTensors: TypeAlias = Annotated[tuple[FrozenTensor, ...], FieldLimit(FROZEN_MAX, counts="entries")]


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A process asks for a lease. An observer asks for a description of the run, without a lease."""

    protocol: Uint32
    process_id: Name
    tensors: Annotated[tuple[TensorSpec, ...], TENSORS] = ()
    decodes: Annotated[tuple[OfferedCodec, ...], FieldLimit(64, counts="entries")] = ()
    held: Annotated[tuple[Held, ...], FRAGMENTS] = ()
    observe: bool = False
    frozen: FrozenTensors = ()
    ties: Ties = ()
    index: Uint32 | None = None
    age_s: Seconds = 0.0
    tokens_seen: TokensMerged = 0
    site: Name = ""


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """A lease, and everything the learner needs to know about the run."""

    generation: Exact
    epoch: Exact
    heartbeat_s: Annotated[float, FieldLimit(3600.0, 0.01)]
    """With more frequent heartbeats, learners would do nothing else."""
    shard_index: FragmentId
    num_shards: Annotated[int, FieldLimit(FRAGMENTS_MAX, 1)]
    num_fragments: Annotated[int, FieldLimit(FRAGMENTS_MAX, 1)]
    manifest_digest: Name
    policy: LearnerPolicy
    fragments: Annotated[tuple[FragmentStatus, ...], FRAGMENTS]
    pulse: Pulse
    tensors: Annotated[tuple[TensorSpec, ...], TENSORS] = ()
    ties: Ties = ()
    index: Uint32 = 0
    rules: Annotated[str, FieldLimit(RULES_MAX, counts="characters")] = ""
    frozen: FrozenTensors = ()
    began_with_nothing: bool = False


AVERAGE = "average"
"""In a Pull, this in place of an encoding asks for the average of the versions, sent as float32."""
FILE, FILE_CHUNK = "version-file", 4 << 20
"""Likewise: asks for the version file as it is on the shard's disk; and the size of its chunks in bytes."""


class Role(StrEnum):
    OBSERVER = "observer"  # reads
    MIRROR = "mirror"  # holds what was announced, for others
    STANDBY = "standby"  # holds the version files


@dataclass(frozen=True, slots=True)
class FollowRequest:
    """A reader asks for the shard's announcements."""

    role: Name
    site: Name = ""
    address: Address = ""
    epoch: Exact = 0
    """For a promoted standby: its own epoch."""
    tokens_merged: TokensMerged = 0


@dataclass(frozen=True, slots=True)
class PullRequest:
    fragment_id: FragmentId
    encodings: Annotated[tuple[Name, ...], FieldLimit(32, counts="entries")] = ()
    have: tuple[Exact, Version] | None = None
    """Epoch and number of the caller's version."""
    want: tuple[Exact, Version] | None = None
    """Epoch and number of the version to send; None: the latest."""
    ranges: Ranges = ()


@dataclass(frozen=True, slots=True)
class PullHeader:
    """Announces a version before its bytes."""

    fragment_id: FragmentId
    version: Version
    epoch: Exact
    merged_version: Version
    forgotten_version: Version
    tokens_merged: TokensMerged
    payload: PayloadHeader | None
    base_version: Version | None = None
    ranges: Ranges = ()


@dataclass(frozen=True, slots=True)
class PushHeader:
    """Announces a contribution, or a seed (round 0), before its bytes."""

    fragment_id: FragmentId
    round: Version
    epoch: Exact
    base_version: Version
    tokens: Annotated[int, FieldLimit(TOKENS_MAX)]
    steps: Annotated[int, FieldLimit(STEPS_MAX)]
    payload: PayloadHeader
    manifest_digest: Name
    tokens_merged: Annotated[int, FieldLimit(TOKENS_COUNTED_MAX)] = 0
    not_finite: bool = False
    part: Annotated[int, FieldLimit(PARTS_MAX - 1)] = 0
    num_parts: Annotated[int, FieldLimit(PARTS_MAX)] = 1
    ranges: Ranges = ()

    @property
    def is_seed(self) -> bool:
        return self.round == 0


class Outcome(Enum):
    """What happened to a push."""

    ACCEPTED = "accepted"  # held until the round closes
    DUPLICATE = "duplicate"  # the same contribution was accepted before
    LATE = "late"  # the round has closed; carry the work into the next one
    REJECTED = "rejected"  # refused; `PushAnswer.code` says why


@dataclass(frozen=True, slots=True)
class PushAnswer:
    """The outcome of a push. A rejection has a stable code and a message."""

    outcome: Outcome
    code: Name = ""
    message: str = ""


T = TypeVar("T")


class Newest(Generic[T]):
    """A queue that keeps only the newest word of each kind about each thing, so the number of things limits its size.

    A thing keeps its turn even if newer words about it arrive, so none waits forever. The words about a thing leave the
    queue together, in the order in which they were put.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[object, dict[object, T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, about: object, kind: object, word: T) -> None:
        """Add a word. It replaces the earlier one of its kind about the same thing."""
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
