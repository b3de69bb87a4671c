"""A recorded shard, decided again: its core gets the same calls, and has to answer and to ask for the same.

A run with `run.history = FOLDER` records them (`diloco_server/shell/decisions.py`). Nothing is computed: values are not
recorded, and no decision looks at them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from diloco_common.codec import Payload, PayloadHeader
from diloco_common.errors import DataError, Refusal, refusal_from
from diloco_common.observe.histories import Line
from diloco_common.observe.history import read_history
from diloco_common.settings import Settings
from diloco_planner.weightless import NOTHING, PUBLISHED
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.fragment import Restored
from diloco_server.core.membership import Member
from diloco_server.core.record import Record
from diloco_server.core.shard import Shard
from diloco_server.shell.decisions import CALLS, FOLDER, as_json, effect_as_json
from diloco_server.shell.rules import find_rules

SHOWN = 600
"""Characters of what differs."""


@dataclass
class Replayed:
    """One process of a shard, decided again."""

    name: str
    epoch: int
    calls: int = 0
    rounds: int = 0
    """That were closed and merged."""
    learners: int = 0
    seconds: float = 0.0
    """From its first tick to its last one."""
    differs: str = ""
    """What was decided otherwise first; empty: nothing was."""


def replay(folder: Path) -> list[Replayed]:
    """All shards of a run, process by process. Raises DataError: there is nothing to replay."""
    return [decide_again(name, life) for name, lives in read(folder).items() for life in lives]


def read(folder: Path) -> dict[str, list[list[Line]]]:
    """Shard -> the lines of each of its processes. `folder`: `run.history`, or decisions in it. Raises DataError."""
    inner = folder / FOLDER
    files = [folder] if folder.is_file() else sorted((inner if inner.is_dir() else folder).glob("*.jsonl"))
    found = {path.stem: list(_lives(read_history(path))) for path in files}
    found = {name: lives for name, lives in found.items() if lives}
    if not found:
        raise DataError(
            f"{folder}: no shard has recorded its decisions there; run with run.history = FOLDER, and name that FOLDER"
        )
    return found


def _lives(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Cut where a process began."""
    life: list[Line] = []
    for line in lines:
        if line["what"] == "began":
            if life:
                yield life
            life = [line]
        elif life and (line["what"] in CALLS or line["what"] == "did"):
            life.append(line)
    if life:
        yield life


def decide_again(name: str, lines: Sequence[Line]) -> Replayed:
    """Raises DataError: the lines are not those of a shard of this release."""
    began, *calls = lines
    found = Replayed(name, began["epoch"])
    try:
        core = _Core(Settings.model_validate(began["settings"]), began["epoch"])
        for number, line in enumerate(calls, start=2):
            found.calls += line["what"] != "did"
            found.differs = core.take(line)
            if found.differs:
                found.differs = f"line {number}, {line['what']}: {found.differs}"
                break
    except (KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(
            f"{name}: its decisions cannot be read ({why}); replay with the release that recorded them"
        ) from error
    found.rounds, found.learners, found.seconds = core.shard.ledger.rounds, len(core.joined), core.seconds
    return found


class _Core:
    def __init__(self, settings: Settings, epoch: int) -> None:
        self.shard = Shard(settings, epoch, find_rules(settings).cadence)
        self.joined: set[str] = set()
        self._members: dict[tuple[str, int], Member] = {}
        self._began: float | None = None
        self._now = 0.0

    @property
    def seconds(self) -> float:
        return 0.0 if self._began is None else self._now - self._began

    def take(self, line: Line) -> str:
        """The next line; what is otherwise than it says."""
        if line["what"] == "did":
            return _difference("effects", line["effects"], [effect_as_json(e) for e in self.shard.take_effects()])
        given = self._given(line["what"], line["given"])
        if "now" in given:
            self._now = given["now"]
            self._began = self._now if self._began is None else self._began
        try:
            gave = getattr(self.shard, line["what"])(**given)
        except Refusal as refusal:
            return _difference("refusal", line.get("refused"), refusal.code)
        if isinstance(gave, Member):
            self._members[gave.learner_id, gave.generation] = gave
            self.joined.add(gave.learner_id)
        if "refused" in line:
            return _difference("refusal", line["refused"], None)
        answer = as_json(gave)
        return _difference("answer", line["gave"], _known(line["gave"], answer) if _is_record(gave) else answer)

    def _given(self, call: str, given: dict[str, Any]) -> dict[str, Any]:
        """What the call was given, as values."""
        kinds = _kinds(call)
        header = kinds["header"].validate_python(given["header"]) if "header" in given else None
        return {
            name: header if name == "header" else self._value(kinds[name], value, header)
            for name, value in given.items()
        }

    def _value(self, kind: Any, value: Any, header: Any) -> Any:
        if isinstance(kind, TypeAdapter):
            return kind.validate_python(value)
        if kind is Member:
            return self._members[value[0], value[1]]
        if kind is Payload:
            return Payload(header.payload, ())
        if kind is Values:
            return Values(NOTHING, [])
        if kind is Refusal:
            return refusal_from(*value)
        if kind is Published:
            return PUBLISHED
        return [
            Restored(_RECORD.validate_python(one["record"]), Values(NOTHING, []), PUBLISHED, one["is_new_line"])
            for one in value
        ]


_RECORD = TypeAdapter(Record)
_OPAQUE = (Member, Payload, Published, Values, Refusal, Sequence[Restored])


@cache
def _kinds(call: str) -> dict[str, Any]:
    """Argument -> how its JSON is read, or what stands for it."""
    hints = get_type_hints(getattr(Shard, call))
    hints.pop("return", None)
    return {name: hint if hint in _OPAQUE else _reader(hint) for name, hint in hints.items()}


def _reader(hint: Any) -> TypeAdapter[Any]:
    reader = TypeAdapter[Any](hint)
    reader.rebuild(
        raise_errors=False, _types_namespace={"PayloadHeader": PayloadHeader}
    )  # messages.py imports it for types
    return reader


def _is_record(gave: Any) -> bool:
    match gave:
        case Record() | (Record(), _):
            return True
    return False


def _known(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """A record without the fields that the release which recorded it did not have. Restored ones lack them, too: what
    they are for is decided as if nothing were known."""
    return {name: value for name, value in now.items() if name in then}


def _difference(what: str, then: Any, now: Any) -> str:
    """Between what was recorded and what is decided now; JSON, so that every digit of a number counts."""
    before, after = json.dumps(then, sort_keys=True), json.dumps(now, sort_keys=True)
    if before == after:
        return ""
    if isinstance(then, list) and isinstance(now, list):  # of many effects the first that differ
        pairs = [(a, b) for a, b in zip(then, now, strict=False) if json.dumps(a) != json.dumps(b)]
        before, after = map(json.dumps, pairs[0]) if pairs else (f"{len(then)} of them", f"{len(now)} of them")
    return f"{what} {before[:SHOWN]} when it was recorded, {after[:SHOWN]} now"
