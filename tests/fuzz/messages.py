"""Bodies of the five calls: right messages with extreme numbers and texts, changed bytes, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fuzzing import FLOATS, TEXTS, mutated, number
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from diloco_common.wire import protobuf
from diloco_protos import parameter_server_pb2 as pb

REPEATED = (0, 1, 1, 1, 2, 3, 40)
"""How often a repeated field is there."""


def parsed(kind: type[Message], value: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    """What reads the bytes of a message, and makes a value of it."""
    return lambda data: value(protobuf.parse(kind, data))


READERS: dict[type[Message], Callable[[bytes], Any]] = {
    pb.JoinRequest: parsed(pb.JoinRequest, protobuf.join_request_from_pb),
    pb.Progress: parsed(pb.Progress, protobuf.progress_from_pb),
    pb.PullRequest: parsed(pb.PullRequest, protobuf.pull_request_from_pb),
    pb.PushRequest: protobuf.push_part,
    pb.LeaveRequest: parsed(pb.LeaveRequest, lambda message: message),
}
"""What a shard makes of each message."""
ANSWERS: dict[type[Message], Callable[[bytes], Any]] = {
    pb.JoinResponse: parsed(pb.JoinResponse, protobuf.join_answer_from_pb),
    pb.Directive: parsed(pb.Directive, protobuf.directive_from_pb),
    pb.PushResponse: parsed(pb.PushResponse, protobuf.answer_from_pb),
    pb.PullResponse: protobuf.pull_part,
}
"""What a learner makes of a shard's."""


def body(chance: random.Random, kind: type[Message]) -> bytes:
    """Some bytes for where a message of this kind is expected."""
    choice = chance.random()
    if choice < 0.1:
        return chance.randbytes(chance.choice((0, 1, 2, 10, 100, 3000)))
    if choice < 0.2:
        other: type[Message] = chance.choice([*READERS, *ANSWERS])
        return drawn(chance, other).SerializeToString()
    data: bytes = drawn(chance, kind).SerializeToString()
    return mutated(chance, data) if choice < 0.5 else data


def drawn(chance: random.Random, kind: type[Message], depth: int = 0) -> Message:
    """A message with any fields set, to anything that its types allow."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if chance.random() < 0.25:
            continue
        count = chance.choice(REPEATED) if field.is_repeated else 1
        for _ in range(count):
            _set(chance, message, field, depth)
    return message


def _set(chance: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None:
        kind: type[Message] = type(getattr(pb, field.message_type.name)())
        inner = drawn(chance, kind, depth + 1)
        if field.is_repeated:
            getattr(message, field.name).append(inner)
        else:
            getattr(message, field.name).CopyFrom(inner)
        return
    value = _value(chance, field)
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def _value(chance: random.Random, field: FieldDescriptor) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return chance.choice(TEXTS)
        case FieldDescriptor.TYPE_BYTES:
            return chance.randbytes(chance.choice((0, 1, 4, 605, 3000)))
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return chance.choice(FLOATS)
        case FieldDescriptor.TYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.TYPE_INT64:
            return number(chance, signed=True)
        case FieldDescriptor.TYPE_UINT64:
            return number(chance)
        case FieldDescriptor.TYPE_ENUM:
            return chance.choice((0, 1, 2, 3, 4, 5, 1000))
        case _:
            return number(chance, 32)


def draw(chance: random.Random) -> tuple[type[Message], bytes]:
    """A kind of message, and bytes that come in its place."""
    kind: type[Message] = chance.choice([*READERS, *ANSWERS])
    return kind, body(chance, kind)


def answer(case: tuple[type[Message], bytes]) -> str:
    """Decode them as a shard or a learner does, in this process. Raises BadRequest."""
    kind, data = case
    (READERS | ANSWERS)[kind](data)
    return "OK"
