"""Converts plain values to messages of diloco.v1 and back, by the names of their fields.

A value of `messages.py` has the same field names as its message, so one converter serves all; annotations give the
types. Exceptions are data, at the top: differing names of messages, and values that are two fields of a message. The
limits are data as well (`bounds.LIMITS`), and are checked before anything becomes a value.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from diloco_common.codec import PayloadHeader
from diloco_common.wire import bounds
from diloco_common.wire.messages import JoinAnswer, PullRequest, PushAnswer
from diloco_protos import parameter_server_pb2 as pb

V = TypeVar("V")
M = TypeVar("M", bound=Message)
CALLED: Mapping[type, str] = {JoinAnswer: "JoinResponse", PushAnswer: "PushResponse", PayloadHeader: "Payload"}
"""Messages with another name than their values."""
PAIRS: Mapping[tuple[type, str], tuple[str, str]] = {
    (PullRequest, "have"): ("epoch", "have_version"), (PullRequest, "want"): ("want_epoch", "want_version"),
}  # fmt: skip
"""Values that are two fields of a message. The second field tells whether the value is present."""


class Field(NamedTuple):
    name: str
    read: Callable[[Any], Any]
    """Message -> value."""
    write: Callable[[Any], Mapping[str, Any]]
    """Value -> fields of a message; None: it is absent."""


Special = Mapping[tuple[type, str], Field]
"""(type of value, field) -> a field that is converted by hand."""


class Converter:
    """Converts all types of values, both ways."""

    def __init__(self, special: Special, checks: Mapping[type, Callable[[Any], Any]]) -> None:
        """`checks`: checks beyond single-field limits; they may replace the value, or raise BadRequest."""
        self._special, self._checks = special, checks
        self._plans: dict[type, tuple[Field, ...]] = {}

    def to_pb(self, value: Any) -> Any:
        found: dict[str, Any] = {}
        for field in self._fields(type(value)):
            found.update(field.write(getattr(value, field.name)))
        return _message(type(value))(**found)

    def from_pb(self, kind: type[V], message: Message) -> V:
        """The value of a message. Raises BadRequest."""
        within(message)
        value = kind(*[field.read(message) for field in self._fields(kind)])
        check = self._checks.get(kind)
        return value if check is None else check(value)

    def _fields(self, kind: type) -> tuple[Field, ...]:
        if kind not in self._plans:
            self._plans[kind] = self._plan(kind)
        return self._plans[kind]

    def _plan(self, kind: type) -> tuple[Field, ...]:
        names = [f.name for f in fields(kind)] if is_dataclass(kind) else kind._fields  # type: ignore[attr-defined]
        hints = get_type_hints(kind, localns={"PayloadHeader": PayloadHeader})
        return tuple(self._special.get((kind, name)) or self._field(kind, name, hints[name]) for name in names)

    def _field(self, kind: type, name: str, hint: Any) -> Field:
        if pair := PAIRS.get((kind, name)):
            return _pair(name, *pair)
        may_be_absent = get_origin(hint) in (Union, types.UnionType)
        if may_be_absent:
            hint = next(one for one in get_args(hint) if one is not type(None))
        if get_origin(hint) is tuple:
            return self._list(name, get_args(hint)[0])
        read: Callable[[Any], Any] = attrgetter(name)
        write: Callable[[Any], Mapping[str, Any]] = lambda value: {name: value}  # noqa: E731
        if _is_value(hint):
            read = lambda message: self.from_pb(hint, getattr(message, name))  # noqa: E731
            write = lambda value: {name: None if value is None else self.to_pb(value)}  # noqa: E731
        elif issubclass(hint, Enum):
            numbers = _message(kind).DESCRIPTOR.fields_by_name[name].enum_type.values_by_name
            by_number = {numbers[member.name].number: member for member in hint}
            read = lambda message: by_number.get(getattr(message, name))  # noqa: E731
            write = lambda value: {name: numbers[value.name].number}  # noqa: E731
        if may_be_absent:
            limit = bounds.LIMITS.get(_name_of(kind), {}).get(name)
            return Field(name, _if_there(name, read, limit if limit and limit.is_dropped else None), write)
        return Field(name, read, write)

    def _list(self, name: str, of: Any) -> Field:
        if not _is_value(of):
            return Field(name, lambda message: tuple(getattr(message, name)), lambda value: {name: value})
        return Field(
            name,
            lambda message: tuple(self.from_pb(of, one) for one in getattr(message, name)),
            lambda value: {name: [self.to_pb(one) for one in value]},
        )


def within(message: M) -> M:
    """Return the message if every field is within its limit. Raises BadRequest."""
    kind = message.DESCRIPTOR.name
    of_fields, of_entries = _LIMITS.get(kind, ((), ()))
    for field, limit in of_fields:
        value = getattr(message, field)
        if not limit.holds(value):
            raise bounds.beyond(f"{kind}.{field}", value, limit)
    for field, limit in of_entries:
        for value in getattr(message, field):
            if not limit.holds(value):
                raise bounds.beyond(f"{kind}.{field}", value, limit)
    return message


_LIMITS = {
    kind: (
        [(field, limit) for field, limit in limits.items() if not field.endswith("[]") and not limit.is_dropped],
        [(field[:-2], limit) for field, limit in limits.items() if field.endswith("[]")],
    )
    for kind, limits in bounds.LIMITS.items()
}


def _if_there(name: str, read: Callable[[Any], Any], drops: bounds.FieldLimit | None) -> Callable[[Any], Any]:
    """A reader that returns None if the field is absent, or beyond the limit `drops`."""

    def read_if_there(message: Any) -> Any:
        if not message.HasField(name):
            return None
        value = read(message)
        return value if drops is None or drops.holds(value) else None

    return read_if_there


def _pair(name: str, first: str, second: str) -> Field:
    return Field(
        name,
        lambda message: (getattr(message, first), getattr(message, second)) if message.HasField(second) else None,
        lambda value: {} if value is None else dict(zip((first, second), value, strict=True)),
    )


def _is_value(hint: Any) -> bool:
    return is_dataclass(hint) or hasattr(hint, "_fields")


def _name_of(kind: type) -> str:
    return CALLED.get(kind, kind.__name__)


def _message(kind: type) -> Any:
    return getattr(pb, _name_of(kind))
