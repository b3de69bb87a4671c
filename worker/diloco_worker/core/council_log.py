"""How the ranks of an island reach the same decisions at the same step boundaries, without waiting for a shard.

At every step boundary each rank posts a small frame, and one boundary later every rank has read all frames. So all
ranks hear the same words in the same order and decide from these words alone. Facts that differ between ranks (what was
pulled, which push was answered, the time) affect a decision only as a word.

    The leader passes on what shards tell it: joined, asked, announced, stopped, the state of the run.
    Every rank reports on its own part: a version is ready or gone; a push was refused; the rank cannot go on.

Versions are pulled by name, one per fragment at a time. All ranks apply a version at the boundary at which all of
them know that all have it. Fragments do not wait for each other. If one rank cannot get the version, all drop it.

A frame has room for a few dozen words. While words wait for the next frame, a newer word replaces an older one about
the same fragment, so an island with many fragments only misses words that are out of date.

Pure: the shell exchanges the frames (`council.py`).
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from diloco_common.codec import CHUNK_ELEMENTS_MAX
from diloco_common.errors import IslandBroken, error_from
from diloco_common.wire.messages import Collect, FragmentStatus, LearnerPolicy, Newest, Outcome, Pulse, PushAnswer
from diloco_worker.core.events import (
    Announced,
    Answered,
    Arrived,
    Asked,
    Event,
    Failed,
    Fetch,
    FetchEnded,
    Gone,
    Joined,
    Stopped,
)

LEADER = 0
LEADER_BYTES = 4096
RANK_BYTES = LEADER_BYTES // 8
"""Size of the frame of every other rank."""
APPLY_ELEMENTS = CHUNK_ELEMENTS_MAX
"""Versions up to this total size are applied at one step boundary, and at least one. The rest wait for the next
boundary. The limit is a size, not a time, so that all ranks stop at the same version."""

_HEAD = struct.Struct("<qH")  # tokens of the step, -1 at a poll; bytes of words


@dataclass(frozen=True, slots=True)
class Ready:
    """This rank has pulled and decoded its ranges of a version."""

    fragment_id: int
    epoch: int
    version: int
    merged_version: int
    forgotten_version: int
    sent: int

    @classmethod
    def of(cls, arrived: Arrived) -> Ready:
        return cls(
            arrived.fragment_id, arrived.epoch, arrived.version, arrived.merged_version, arrived.forgotten_version,
            arrived.sent,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StopAsked:
    """All ranks should stop."""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """All ranks should leave."""


Word = Event | Ready | StopAsked | LeaveAsked | Pulse


_TYPES: dict[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (
        FragmentStatus, LearnerPolicy, Pulse, Asked, Collect, Announced, Answered, PushAnswer, Outcome, Stopped,
        Gone, Ready, StopAsked, LeaveAsked,
    )
}  # fmt: skip
_TYPES |= {
    "tuple": lambda *entries: entries,
    "Failed": lambda code, words: Failed(error_from(code, words)),
    "Joined": lambda *said: Joined(*said[:-1], address=said[-1]),
}


def write_word(word: Word) -> bytes:
    """One line of JSON with its newline. Tensors are never written, only that they are ready.

    The ranks of an island run the same release and trust each other, so nothing is checked here.
    """
    assert not isinstance(word, Arrived)
    return json.dumps(_as_json(word), separators=(",", ":")).encode() + b"\n"


def read_word(line: bytes) -> Word:
    word: Word = _from_json(json.loads(line))
    return word


def _as_json(value: Any) -> Any:
    """Dataclasses and tuples become lists that begin with the type's name."""
    match value:
        case Failed():
            return ["Failed", value.error.code, str(value.error)]
        case Outcome():
            return ["Outcome", value.value]
        case tuple():
            return ["tuple", *map(_as_json, value)]
        case None | bool() | int() | float() | str():
            return value
    return [type(value).__name__, *(_as_json(getattr(value, f.name)) for f in fields(value))]


def _from_json(said: Any) -> Any:
    return _TYPES[said[0]](*map(_from_json, said[1:])) if isinstance(said, list) else said


@dataclass(frozen=True, slots=True)
class Turn:
    """The decisions of all ranks at one boundary."""

    tokens: int | None
    """Trained by all ranks in the previous step; None: there was no step."""
    events: tuple[Event, ...]
    """In order. Equal on all ranks, except for the values in `Arrived`."""
    fetches: tuple[Fetch, ...]
    ended: tuple[FetchEnded, ...] = ()


@dataclass
class _Fetching:
    fetch: Fetch
    ready: dict[int, Ready] = field(default_factory=dict)
    """Rank -> its word."""


class CouncilLog:
    """The words that one rank says and has heard."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.pulse = Pulse(0, 0)
        self.is_stop_asked = False
        self.is_leave_asked = False
        self.elements: Mapping[int, int] = {}
        """Fragment -> its elements, once the model is cut."""
        self._unsaid: Newest[Word] = Newest()
        self._begun = bytearray()  # the rest of a word that did not fit into the last frame
        self._said_pulse = self.pulse
        self._said_epochs: dict[int, int] = {}  # shard -> the epoch that this rank reported last
        self._unread = [bytearray() for _ in range(size)]
        self._fetching: dict[int, _Fetching] = {}
        self._newer: dict[int, Fetch] = {}  # announced while the previous version is pulled
        self._applied: dict[int, Fetch] = {}
        self._complete: deque[int] = deque()  # fragments whose version all ranks have
        self._arrived: dict[int, dict[Fetch, Arrived]] = {}  # fragment -> versions that this rank has
        self._epochs: dict[int, int] = {}  # shard -> its epoch

    # ------------------------------------------------------------ words of this rank

    def say(self, event: Event) -> None:
        """Report an event from a shard, or about this rank's own part."""
        match event:
            case Arrived():
                fetching = self._fetching.get(event.fragment_id)
                wanted, held = fetching and fetching.fetch, self._arrived.get(event.fragment_id, {})
                kept = {fetch: earlier for fetch, earlier in held.items() if fetch == wanted}
                self._arrived[event.fragment_id] = kept | {_fetch_of(event): event}
                if wanted == _fetch_of(event):
                    self._say(Ready.of(event))
                # Otherwise it was dropped, or the leader has it before all ranks have heard its announcement.
            case Answered() if event.answer.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
                return  # only a version shows that all parts have arrived
            case _:
                self._say(event)

    def say_pulse(self, pulse: Pulse) -> None:
        """Report the state of the run if it has changed. Only the leader's word counts."""
        if self.rank == LEADER and pulse != self._said_pulse:
            self._said_pulse = pulse
            self._say(pulse)

    def ask_stop(self) -> None:
        """Ask all ranks to stop."""
        self._say(StopAsked())

    def ask_leave(self) -> None:
        """Ask all ranks to hand over their work and leave."""
        self._say(LeaveAsked())

    def frame(self, tokens: int | None) -> bytes:
        """The frame for this boundary. `tokens`: trained by this rank in the step that ended; None: a poll."""
        room = (LEADER_BYTES if self.rank == LEADER else RANK_BYTES) - _HEAD.size
        begun = self._begun
        while self._unsaid and len(begun) < room:
            begun += write_word(self._unsaid.take())
        said, self._begun = begun[:room], begun[room:]
        return _HEAD.pack(-1 if tokens is None else tokens, len(said)) + said

    def _say(self, word: Word) -> None:
        kind = type(word)
        match word:
            case Announced():
                self._unsaid.put(("version", word.fragment_id), kind, word)
            case Asked():
                self._unsaid.put(("version", word.directive.fragment_id), kind, word)
            case Joined():
                if self._said_epochs.get(word.shard_index) != word.epoch:
                    # The shard repeats its announcements, and they must be heard after this.
                    self._said_epochs[word.shard_index] = word.epoch
                    for status in word.fragments:
                        self._unsaid.drop(("version", status.fragment_id))
                    self._unsaid.drop((kind, word.shard_index))
                self._unsaid.put((kind, word.shard_index), kind, word)
            case Ready() | Gone():
                self._unsaid.put(("pull", word.fragment_id), kind, word)
            case Answered():
                self._unsaid.put((kind, word.fragment_id, word.round, word.tokens), kind, word)
            case Stopped():
                self._unsaid.put((kind, word.shard_index), kind, word)
            case _:
                self._unsaid.put(kind, kind, word)

    # ------------------------------------------------------------ words of all ranks

    def hear(self, frames: Sequence[bytes]) -> Turn:
        """Take the frames of all ranks for one boundary, in rank order. Raises IslandBroken."""
        self._events: list[Event] = []
        self._fetches: list[Fetch] = []
        self._ended: list[FetchEnded] = []
        count = tokens_of(frames)
        for rank, frame in enumerate(frames):
            _, length = _HEAD.unpack_from(frame)
            unread = self._unread[rank]
            unread += frame[_HEAD.size : _HEAD.size + length]
            *lines, rest = unread.split(b"\n")
            self._unread[rank] = bytearray(rest)
            for line in lines:
                self._heard(rank, read_word(bytes(line)))
        self._apply(is_step=count is not None)
        return Turn(count, tuple(self._events), tuple(self._fetches), tuple(self._ended))

    def _heard(self, rank: int, word: Word) -> None:
        match word:
            case Announced():
                self._announced(Fetch(word.fragment_id, word.epoch, word.version))
            case Ready():
                self._is_ready(rank, word)
            case Gone():
                fetching = self._fetching.get(word.fragment_id)
                if fetching is not None and fetching.fetch == _fetch_of(word):
                    self._drop(word.fragment_id)
            case Pulse():
                self.pulse = word
            case StopAsked():
                self.is_stop_asked = True
            case LeaveAsked():
                self.is_leave_asked = True
            case Joined():
                self._joined(word)
                self._events.append(word)
            case Failed() if rank != LEADER:
                self._events.append(Failed(error_from(word.error.code, f"rank {rank}: {word.error}")))
            case _:
                self._events.append(word)

    def _joined(self, joined: Joined) -> None:
        """A shard in a new epoch may have lost versions, and announces those that it has, perhaps under the same names.

        The leader has started over, so it is not told what is dropped here."""
        if self._epochs.get(joined.shard_index) != joined.epoch:
            self._epochs[joined.shard_index] = joined.epoch
            for status in joined.fragments:
                self._newer.pop(status.fragment_id, None)
                self._drop(status.fragment_id, is_told=False)

    # ------------------------------------------------------------ versions

    def _announced(self, fetch: Fetch) -> None:
        p, applied = fetch.fragment_id, self._applied.get(fetch.fragment_id)
        if applied is not None and applied.epoch == fetch.epoch and fetch.version <= applied.version:
            self._ended.append(FetchEnded(fetch, is_applied=True))
        elif p not in self._fetching:
            self._fetching[p] = _Fetching(fetch)
            self._fetches.append(fetch)
            if (arrived := self._arrived.get(p, {}).get(fetch)) is not None:
                self._say(Ready.of(arrived))
        elif self._fetching[p].fetch != fetch:
            self._newer[p] = fetch

    def _is_ready(self, rank: int, word: Ready) -> None:
        fetching = self._fetching.get(word.fragment_id)
        if fetching is None or fetching.fetch != _fetch_of(word):
            return
        fetching.ready[rank] = word
        if len(fetching.ready) == self.size and word.fragment_id not in self._complete:
            self._complete.append(word.fragment_id)

    def _apply(self, *, is_step: bool) -> None:
        elements = 0
        while self._complete and (not is_step or elements < APPLY_ELEMENTS):
            p = self._complete.popleft()
            elements += self.elements.get(p, 0)
            fetching = self._fetching[p]
            told = fetching.ready[LEADER]
            sent = {word.sent for word in fetching.ready.values()}
            arrived = replace(
                self._arrived[p].pop(fetching.fetch),
                merged_version=told.merged_version,
                forgotten_version=told.forgotten_version,
                sent=sent.pop() if len(sent) == 1 else 0,
            )
            self._events.append(arrived)
            self._applied[p] = fetching.fetch
            self._drop(p, is_applied=True)

    def _drop(self, fragment_id: int, *, is_applied: bool = False, is_told: bool = True) -> None:
        """The version was applied, or a rank cannot get it: continue with the next one, if any."""
        # Arrived versions stay: the same one may be wanted again, and the others know that it is here.
        fetching = self._fetching.pop(fragment_id, None)
        if fetching is not None and is_told:
            self._ended.append(FetchEnded(fetching.fetch, is_applied))
        if fragment_id in self._complete:
            self._complete.remove(fragment_id)
        newer = self._newer.pop(fragment_id, None)
        if newer is not None:
            self._announced(newer)


def tokens_of(frames: Sequence[bytes]) -> int | None:
    """Tokens trained by all ranks in the step before these frames; None: there was no step.
    Raises IslandBroken if only some ranks took a step."""
    tokens = [count for count, _ in map(_HEAD.unpack_from, frames) if count >= 0]
    if tokens and len(tokens) != len(frames):
        raise IslandBroken(
            f"{len(tokens)} of {len(frames)} ranks have called `step`, the others `poll`; all ranks of an island must "
            "call the same ones in the same order"
        )
    return sum(tokens) if tokens else None


def _fetch_of(word: Arrived | Ready | Gone) -> Fetch:
    return Fetch(word.fragment_id, word.epoch, word.version)
