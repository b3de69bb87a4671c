"""What a learner's links hand to its training, and where it lies: as diloco_worker/inbox.py, without its lock."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diloco_common.errors import DilocoError
from diloco_common.messages import Collect, PushAnswer
from diloco_simulator.messages import JoinAnswer


@dataclass(frozen=True, slots=True)
class Joined:
    answer: JoinAnswer


@dataclass(frozen=True, slots=True)
class Asked:
    directive: Collect
    epoch: int


@dataclass(frozen=True, slots=True)
class Answered:
    fragment_id: int
    round: int
    answer: PushAnswer


@dataclass(frozen=True, slots=True)
class Arrived:
    fragment_id: int
    version: int
    epoch: int
    values: Tensor
    merged_version: int


@dataclass(frozen=True, slots=True)
class Stopped:
    shard_index: int


@dataclass(frozen=True, slots=True)
class Failed:
    error: DilocoError


Event = Joined | Asked | Answered | Arrived | Stopped | Failed


class Inbox:
    """Of each kind it holds the newest per fragment, or per shard."""

    def __init__(self) -> None:
        self._events: dict[tuple[type[Event], int], Event] = {}

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        key = (type(event), _subject(event))
        self._events.pop(key, None)
        self._events[key] = event

    def take(self) -> list[Event]:
        events = list(self._events.values())
        self._events.clear()
        return events


def _subject(event: Event) -> int:
    match event:
        case Joined():
            return event.answer.shard_index
        case Asked():
            return event.directive.fragment_id
        case Answered() | Arrived():
            return event.fragment_id
        case Stopped():
            return event.shard_index
        case Failed():
            return 0
