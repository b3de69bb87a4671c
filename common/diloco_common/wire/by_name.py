"""Converts plain values to messages of diloco.v1 and back, by the names of their fields.

A value of `messages.py` has the same field names as its message, so one converter serves all; annotations give the
types and the limits, which are checked before anything becomes a value. The tables at the top list the exceptions:
messages with other names, and values that take two fields of a message.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from diloco_common.codec import PayloadHeader
from diloco_common.wire.bounds import FieldLimit, beyond
from diloco_common.wire.messages import JoinAnswer, PullRequest, PushAnswer
from diloco_protos import parameter_server_pb2 as pb

V = TypeVar("V")
M = TypeVar("M", bound=Message)
CALLED: Mapping[type, str] = {JoinAnswer: "JoinResponse", PushAnswer: "PushResponse", PayloadHeader: "Payload"}
"""Values -> their messages, if these have other names."""
PAIRS: Mapping[tuple[type, str], tuple[str, str]] = {
    (PullRequest, "have"): ("epoch", "have_version"), (PullRequest, "want"): ("want_epoch", "want_version"),
}  # fmt: skip
"""Values that take two fields of a message. The second field tells whether the value is present."""


class Field(NamedTuple):
    name: str
    read: Callable[[Any], Any]
    """Message -> value."""
    write: Callable[[Any], Mapping[str, Any]]
    """Value -> fields of a message. The value is None if it is absent."""


class Conversion(NamedTuple):
    """How values of one type are converted."""

    fields: tuple[Field, ...]
    limits: tuple[tuple[str, FieldLimit], ...]
    """Limits of fields of the message, except of fields whose values are dropped beyond their limit."""
    limits_of_entries: tuple[tuple[str, FieldLimit], ...]
    """Limits of each entry of a list."""


Special = Mapping[tuple[type, str], Field]
"""(type of value, field) -> a field that is converted by hand."""


class Converter:
    """Converts all types of values, both ways."""

    def __init__(self, special: Special, checks: Mapping[type, Callable[[Any], Any]]) -> None:
        """`checks`: checks beyond single-field limits; they may replace the value, or raise BadRequest."""
        self._special, self._checks = special, checks
        self._conversions: dict[type, Conversion] = {}

    def to_pb(self, value: Any) -> Any:
        found: dict[str, Any] = {}
        for field in self._conversion(type(value)).fields:
            found.update(field.write(getattr(value, field.name)))
        return _message(type(value))(**found)

    def from_pb(self, kind: type[V], message: Message) -> V:
        """The value of a message. Raises BadRequest."""
        conversion = self._conversion(kind)
        for name, limit in conversion.limits:
            value = getattr(message, name)
            if not limit.holds(value):
                raise beyond(f"{_name_of(kind)}.{name}", value, limit)
        for name, limit in conversion.limits_of_entries:
            for entry in getattr(message, name):
                if not limit.holds(entry):
                    raise beyond(f"{_name_of(kind)}.{name}", entry, limit)
        found = kind(*[field.read(message) for field in conversion.fields])
        check = self._checks.get(kind)
        return found if check is None else check(found)

    def _conversion(self, kind: type) -> Conversion:
        if kind not in self._conversions:
            names = [f.name for f in fields(kind)] if is_dataclass(kind) else kind._fields  # type: ignore[attr-defined]
            hints, limits = _hints(kind), limits_of(kind)
            self._conversions[kind] = Conversion(
                tuple(
                    self._special.get((kind, name)) or self._field(kind, name, hints[name], limits.get(name))
                    for name in names
                ),
                tuple((n, limit) for n, limit in limits.items() if not n.endswith("[]") and not limit.is_dropped),
                tuple((n[:-2], limit) for n, limit in limits.items() if n.endswith("[]")),
            )
        return self._conversions[kind]

    def _field(self, kind: type, name: str, hint: Any, limit: FieldLimit | None) -> Field:
        if pair := PAIRS.get((kind, name)):
            return _pair(name, *pair)
        may_be_absent = get_origin(hint) in (Union, types.UnionType)
        hint = _present(hint)
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


def limits_of(kind: type) -> Mapping[str, FieldLimit]:
    """Fields of the message of this type of value -> their limits; `name[]` is for each entry of a list."""
    found: dict[str, FieldLimit] = {}
    for name, hint in _hints(kind, include_extras=True).items():
        hint = _present(hint)
        pair = PAIRS.get((kind, name))
        for field, one in [(name, hint)] if pair is None else zip(pair, get_args(hint), strict=True):
            while get_origin(one) in (Annotated, tuple):
                if get_origin(one) is Annotated:
                    found[field] = one.__metadata__[-1]
                one, field = get_args(one)[0], field if get_origin(one) is Annotated else f"{field}[]"
    return found


def _if_there(name: str, read: Callable[[Any], Any], drops: FieldLimit | None) -> Callable[[Any], Any]:
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


def _hints(kind: type, *, include_extras: bool = False) -> dict[str, Any]:
    return get_type_hints(kind, localns={"PayloadHeader": PayloadHeader}, include_extras=include_extras)


def _present(hint: Any) -> Any:
    """The type of a value when it is present, if it may be absent."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    return next(one for one in get_args(hint) if one is not type(None))


def _is_value(hint: Any) -> bool:
    return is_dataclass(hint) or hasattr(hint, "_fields")


def _name_of(kind: type) -> str:
    return CALLED.get(kind, kind.__name__)


def _message(kind: type) -> Any:
    return getattr(pb, _name_of(kind))
