"""The messages between learners and shards, as plain values.

The pure cores use these. `protobuf.py` converts them to the protobuf messages of diloco.v1 and back. The meaning of
each field is documented once, in protos/diloco_protos/parameter_server.proto. What may be absent there is None here.
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
    from diloco_common.codec import PayloadHeader  # imports torch, and whoever reads messages need not


class Range(NamedTuple):
    """Elements start to stop - 1 of a flat fragment. A tuple, because callers send many."""

    start: int
    stop: int


def check_ranges(what: str, ranges: Sequence[Range]) -> None:
    """They ascend, are disjoint, and none is empty; they may touch. Raises BadRequest."""
    for start, stop in ranges:
        if start >= stop:
            raise BadRequest(f"{what} has a range from {start} to {stop}, which is empty; leave it out")
    for before, after in itertools.pairwise(ranges):
        if before.stop > after.start:
            raise BadRequest(
                f"{what} has a range from {after.start} after one that ends at {before.stop}; "
                "ranges must ascend and be disjoint"
            )


PROTOCOL = 2
"""2: a checksum for each chunk, parts and ranges, chunks of up to 4 MiB. Speakers of 1 are
refused when they join (PROTOCOL_MISMATCH)."""
SLOWEST_BYTES_PER_S = 50_000
"""A slower transfer is given up and tried again. 0.4 Mbit/s."""
PROBE_MESSAGE_BYTES, PROBE_BYTES_MAX, PROBE_S = 64 << 10, 4 << 20, 2.0
"""Of a measurement of the way to a shard: bytes of a message, bytes of all, and seconds until it is answered."""
PUSHES_AT_ONCE = 4
"""Concurrent pushes of one learner to one shard. With more of them on a thin link, each becomes too slow to finish."""


class VersionId(NamedTuple):
    """Names the same bytes of a fragment for ever."""

    epoch: int
    """That the version was made in."""
    version: int
    """Its number: of outer steps."""


LINE = 10**10
"""An epoch is seconds since 1970 (or drawn below that), plus this for each time that a standby was promoted: so every
epoch of a promoted shard is above every one of the shard that it stood by for, whenever that is started again."""


def check_no_way_back(answer: JoinAnswer, seen: int) -> None:
    """Whoever has seen an epoch of a promoted shard does not go back to one before; but a folder may have been emptied
    since. Raises Unavailable."""
    epoch, is_newer = answer.epoch, answer.began_with_nothing and answer.epoch % LINE > seen % LINE
    if epoch // LINE < seen // LINE and not is_newer:
        raise Unavailable(
            f"this is epoch {epoch} of the shard, from before its standby was promoted (epoch {seen}); end it, and "
            "give the address of the promoted one"
        )


@dataclass(frozen=True, slots=True)
class ShardAway:
    """A shard that a learner does not reach."""

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
    """The learner is about to leave: fragments with work of it that neither a version nor a contribution under way
    holds. None: it is not."""
    inner: str = ""
    """What steps its parameters: ADAM for Adam and its kin, OTHER; empty: not known."""
    pushes_fail_why: str = ""
    """Why pushes to the shard that hears this fail; empty: they do not."""
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
    """How to have these bytes from somebody else."""


@dataclass(frozen=True, slots=True)
class Near:
    """The bytes of a version, for whoever takes them from a mirror."""

    address: str
    """Of the mirror; empty: of none."""
    values_sha256: bytes
    change_sha256: bytes
    """Empty: there is no change."""
    header: PullHeader
    """What the shard itself says of the version."""


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
    on_commit: str
    blend_alpha: float
    error_feedback: bool


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
    """A version that a learner holds."""

    fragment_id: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """A frozen parameter or a fixed buffer of a learner's model: it must be the same everywhere."""

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
    take_number: bool = False
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
"""In place of an encoding in a Pull: the average of the versions, which comes as float32."""
FILE, FILE_CHUNK = "version-file", 4 << 20
"""The same: the version file as the shard's disk has it, in chunks of so many bytes."""


class Role(StrEnum):
    """What a reader is."""

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
    """Of a standby that was promoted: its own."""
    tokens_merged: int = 0


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Asks for a version of a fragment."""

    fragment_id: int
    encodings: tuple[str, ...] = ()
    have: tuple[int, int] | None = None
    """Epoch and number of the version that the caller has."""
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
    """Of each kind of word about one thing the newest, so that what waits is bounded by how many things there are.

    A thing keeps its turn, however often there is a newer word about it: none is passed over for ever. The words about
    it come together, in the order in which they were said.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[object, dict[object, T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, about: object, kind: object, word: T) -> None:
        """This, and no more the earlier word of its kind about the same thing."""
        words = self._waiting.setdefault(about, {})
        words.pop(kind, None)
        words[kind] = word

    def drop(self, about: object) -> None:
        """Nothing about this any more."""
        self._waiting.pop(about, None)

    def take(self) -> T:
        """The next word."""
        about, words = next(iter(self._waiting.items()))
        word = words.pop(next(iter(words)))
        if not words:
            del self._waiting[about]
        return word
