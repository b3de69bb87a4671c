"""The words of an island's log, and how they are written: one line of JSON each.

The ranks of an island run the same release and believe each other, so nothing is checked here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass
from typing import Any

from diloco_common.errors import error_from
from diloco_common.wire.messages import Collect, FragmentStatus, LearnerPolicy, Outcome, Pulse, PushAnswer
from diloco_worker.core.events import Announced, Answered, Arrived, Asked, Event, Failed, Gone, Joined, Stopped


@dataclass(frozen=True, slots=True)
class Ready:
    """This rank has pulled and decoded its ranges of a version."""

    fragment_id: int
    epoch: int
    version: int
    merged_version: int
    forgotten_version: int
    sent: int
    """As in `Arrived`."""

    @classmethod
    def of(cls, arrived: Arrived) -> Ready:
        return cls(
            arrived.fragment_id, arrived.epoch, arrived.version, arrived.merged_version, arrived.forgotten_version,
            arrived.sent,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StopAsked:
    """All ranks shall stop."""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """All ranks shall leave."""


Word = Event | Ready | StopAsked | LeaveAsked | Pulse


def write_word(word: Word) -> bytes:
    """One line, its end included."""
    match word:
        case Joined():
            said: list[Any] = ["joined", asdict(word)]
        case Asked():
            said = ["asked", word.epoch, *astuple(word.directive)]
        case Announced():
            said = ["announced", *astuple(word)]
        case Answered():
            answer = word.answer
            said = ["answered", word.fragment_id, word.round, word.tokens, answer.outcome.value, answer.code]
        case Stopped():
            said = ["stopped", word.shard_index]
        case Failed():
            said = ["failed", word.error.code, str(word.error)]
        case Gone():
            said = ["gone", *astuple(word)]
        case Ready():
            said = ["ready", *astuple(word)]
        case Pulse():
            said = ["pulse", *astuple(word)]
        case StopAsked():
            said = ["stop"]
        case LeaveAsked():
            said = ["leave"]
        case Arrived():
            raise AssertionError("values are never said, only that they are ready")
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def read_word(line: bytes) -> Word:
    kind, *said = json.loads(line)
    match kind:
        case "joined":
            (facts,) = said
            statuses = tuple(FragmentStatus(**status) for status in facts.pop("fragments"))
            return Joined(**facts | {"policy": LearnerPolicy(**facts["policy"]), "fragments": statuses})
        case "asked":
            return Asked(Collect(*said[1:]), said[0])
        case "announced":
            return Announced(*said)
        case "answered":
            fragment_id, round_number, tokens, outcome, code = said
            return Answered(fragment_id, round_number, PushAnswer(Outcome(outcome), code), tokens)
        case "stopped":
            return Stopped(*said)
        case "failed":
            code, words = said
            return Failed(error_from(code, words))
        case "gone":
            return Gone(*said)
        case "ready":
            return Ready(*said)
        case "pulse":
            return Pulse(*said)
        case "stop":
            return StopAsked()
        case "leave":
            return LeaveAsked()
    raise AssertionError(f"there is no word {kind!r}")
