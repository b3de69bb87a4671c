"""Plain values between the threads of a learner: events from its connections, and acts of a step boundary.

Events go to the training thread, in a bounded queue. `StepBoundary` makes acts in order; `Connections.perform` carries
out those for shards, and the telemetry records all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import dropwhile
from typing import Self

from torch import Tensor

from diloco_common.errors import DilocoError
from diloco_common.wire.manifest import Manifest
from diloco_common.wire.messages import Collect, JoinAnswer, Progress, PushAnswer
from diloco_worker.core.fragment import Fate, PendingContribution
from diloco_worker.core.tensors import Difference, FragmentTensors


@dataclass(frozen=True, slots=True)
class Joined(JoinAnswer):
    address: str = field(kw_only=True)

    @classmethod
    def at(cls, address: str, answer: JoinAnswer) -> Self:
        return cls(**{f.name: getattr(answer, f.name) for f in fields(JoinAnswer)}, address=address)


@dataclass(frozen=True, slots=True)
class Asked:
    directive: Collect
    epoch: int


@dataclass(frozen=True, slots=True)
class Answered:
    fragment_id: int
    round: int
    answer: PushAnswer
    tokens: int = 0
    """Tokens of the contribution, since another one may be in flight for the same round. 0: it cannot be."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A shard has a version. Only between ranks: a single process pulls it without being told."""

    fragment_id: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A shard no longer holds a version that all ranks want. Only between ranks."""

    fragment_id: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A version was pulled to the model's device: the learner's next anchor, and the base of the next change."""

    fragment_id: int
    version: int
    epoch: int
    values: Tensor
    merged_version: int
    difference: Difference | None = None
    """Computed ahead, to apply the version."""
    forgotten_version: int = 0
    sent: int = 0
    """Between ranks: tokens of the contribution whose part, all finite, this rank had sent before it saw this version
    (0: none). When applied: of the one whose parts all ranks had sent. No version can hold any other contribution."""


@dataclass(frozen=True, slots=True)
class Fetch:
    fragment_id: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """All ranks have applied this version, or dropped it."""

    fetch: Fetch
    is_applied: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    shard_index: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The learner cannot go on: it was refused for good."""

    error: DilocoError


Event = Joined | Asked | Answered | Arrived | Announced | Gone | Stopped | Failed

_Subject = int | str | tuple[int, int, int]


class EventQueue:
    """Holds only the newest event of each kind per fragment or shard, so it is bounded however slow the reader is.

    Answers are kept per contribution: an answer about an earlier one may follow a refusal, which is given only once.
    There are at most as many answers as the reader has started pushes.
    """

    def __init__(self) -> None:
        self._events: dict[tuple[type[Event], _Subject], Event] = {}

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events.values())

    def put(self, event: Event) -> None:
        """Append an event; it replaces an unread one of its kind and subject. `Failed` goes first.

        A version keeps the place of the one before it. Otherwise a reader that applies few at a time would never reach
        a fragment whose rounds are quick.
        """
        key = _key(event)
        if self._goes_on(self._events.get(key), event):
            self._events[key] = event
            return
        self._events.pop(key, None)
        if isinstance(event, Failed):
            self._events = {key: event} | self._events
        else:
            self._events[key] = event

    def _goes_on(self, before: Event | None, event: Event) -> bool:
        """Whether it is the next version of the same epoch, and overtakes neither a `Joined` nor an answer about its
        fragment: a version may hold a contribution that an answer has refused."""
        if not isinstance(event, Arrived) or not isinstance(before, Arrived) or event.epoch != before.epoch:
            return False
        behind = dropwhile(lambda one: one is not before, self._events.values())
        return not any(
            isinstance(one, Joined) or (isinstance(one, Answered) and one.fragment_id == event.fragment_id)
            for one in behind
        )

    def pop(self) -> Event | None:
        return self._events.pop(next(iter(self._events))) if self._events else None


def _key(event: Event) -> tuple[type[Event], _Subject]:
    return type(event), _subject(event)


def _subject(event: Event) -> _Subject:
    match event:
        case Joined():
            return event.address
        case Asked():
            return event.directive.fragment_id
        case Answered():
            return event.fragment_id, event.round, event.tokens
        case Arrived() | Announced() | Gone():
            return event.fragment_id
        case Stopped():
            return event.shard_index
        case Failed():
            return ""


@dataclass(frozen=True, slots=True)
class ModelCut:
    manifest: Manifest
    tensors: Mapping[int, FragmentTensors]
    """Fragment -> tensors, for the codec thread."""


@dataclass(frozen=True, slots=True)
class PushContribution:
    """Push this contribution: a round asks for it."""

    contribution: PendingContribution
    cpu_seconds: float = 0.0
    """CPU time of the training thread for the snapshot."""


@dataclass(frozen=True, slots=True)
class OfferSeed:
    """Offer these values to the shard, which has no version of this fragment."""

    fragment_id: int
    values: Tensor
    hold_s: float
    """Seconds to wait first: another learner may have better values."""


@dataclass(frozen=True, slots=True)
class VersionApplied:
    fragment_id: int
    version: int
    epoch: int
    values: Tensor
    contribution: PendingContribution | None
    """The contribution whose fate this version decides."""
    fate: Fate | None
    since: int
    """The learner's token count after which its work is in no version, as far as it knows."""
    seconds: float
    cpu_seconds: float
    replaced: object
    """Freed with the act, in the network thread: freeing so much memory can take longer than applying a version."""


@dataclass(frozen=True, slots=True)
class WorkCarried:
    contribution: PendingContribution


@dataclass(frozen=True, slots=True)
class StepEnded:
    """An inner step ended. Includes its cost for the training loop."""

    progress: Progress
    tokens: int
    step_s: float
    """Seconds since the end of the previous step."""
    stall_s: float
    """Seconds that `step` held up the training loop."""


@dataclass(frozen=True, slots=True)
class LastRounds:
    """The learner leaves and asks for a last round of each of these fragments."""

    fragment_ids: frozenset[int]


Act = (
    ModelCut | PushContribution | OfferSeed | VersionApplied | WorkCarried | StepEnded | LastRounds | Fetch
    | FetchEnded | Answered | Joined | Failed
)  # fmt: skip
"""`Answered`: a push has its outcome. `Joined`: all ranks have a lease. `Failed`: the learner cannot go on."""


@dataclass(frozen=True, slots=True)
class Figures:
    inner_step: int = 0
    tokens: int = 0
    contributions: Mapping[str, int] | None = None
    """As in `LearnerCore`; None: the model is not cut yet."""
    tokens_carried: float = 0.0
    unmerged: int = 0
    tokens_unmerged: float = 0.0
    """As in `LearnerCore`."""
    versions_undone: int = 0
    """Versions that inner steps seem to have undone."""
