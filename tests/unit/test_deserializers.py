"""Any bytes at all: what reads messages gives values within their limits, or a BadRequest, and never anything else.

The limits are those of bounds.py; test_bounds.py compares them with the page, so one that is dropped is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from diloco_common.errors import WORDS_MAX, BadRequest
from diloco_common.wire import protobuf
from diloco_common.wire.bounds import LIMITS, Limit
from diloco_protos import parameter_server_pb2 as pb

Kind = type[Message]
READERS: dict[str, tuple[Kind, Callable[[Any], Any], Callable[[Any], Message | None]]] = {
    "join": (pb.JoinRequest, protobuf.join_request_from_pb, protobuf.join_request_to_pb),
    "join answer": (pb.JoinResponse, protobuf.join_answer_from_pb, protobuf.join_answer_to_pb),
    "progress": (pb.Progress, protobuf.progress_from_pb, protobuf.progress_to_pb),
    "directive": (
        pb.Directive, protobuf.directive_from_pb, lambda d: None if d is None else protobuf.directive_to_pb(d),
    ),
    "push": (pb.PushHeader, protobuf.push_header_from_pb, protobuf.push_header_to_pb),
    "push answer": (pb.PushResponse, protobuf.answer_from_pb, protobuf.answer_to_pb),
    "pull": (pb.PullRequest, protobuf.pull_request_from_pb, protobuf.pull_request_to_pb),
    "pull answer": (pb.PullHeader, protobuf.pull_header_from_pb, protobuf.pull_header_to_pb),
}  # fmt: skip
"""What is read -> its message, what makes a value of it, and what makes a message of that."""
WORDS = Limit(WORDS_MAX, 0, "characters")
"""Of a refusal: they are cut."""
EXTREMES = (0, 1, 8, 9, 2**31, 2**32 - 1, 2**32, 2**40, 2**40 + 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def numbers(least: int, most: int) -> st.SearchStrategy[int]:
    known = [number for number in (*EXTREMES, -1, least) if least <= number <= most]
    return st.one_of(st.sampled_from(known), st.integers(least, most))


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: numbers(0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: numbers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: numbers(0, 2**64 - 1),
    FieldDescriptor.TYPE_INT64: numbers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_ENUM: numbers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_STRING: st.one_of(
        st.sampled_from(["", "carry", "int8", "x" * 64, "x" * 65, "é" * 3000, "../\x00\x1b[2J"]), st.text(max_size=20)
    ),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=20),
}


@st.composite
def messages(draw: st.DrawFn, kind: Kind) -> Message:
    """Any message of a kind: each field is left out, or anything that its type can carry."""
    found = kind()
    for field in kind.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            part = messages(field.message_type._concrete_class)
            if field.is_repeated:
                getattr(found, field.name).extend(draw(st.lists(part, max_size=3)))
            else:
                getattr(found, field.name).CopyFrom(draw(part))
        elif field.is_repeated:
            long = st.lists(SCALARS[field.type], min_size=9, max_size=40)
            getattr(found, field.name).extend(draw(st.one_of(st.lists(SCALARS[field.type], max_size=3), long)))
        else:
            setattr(found, field.name, draw(SCALARS[field.type]))
    return found


def beyond(message: Message) -> Iterator[str]:
    """Fields, of a message and those in it, that are beyond their limits."""
    kind = message.DESCRIPTOR.name
    limits = {"message": WORDS, **LIMITS.get(kind, {})}
    for field, value in message.ListFields():
        if field.name in limits and not limits[field.name].holds(value):
            yield f"{kind}.{field.name}"
        for entry in value if field.is_repeated else [value]:
            if isinstance(entry, Message):
                yield from beyond(entry)
            elif (name := f"{field.name}[]") in limits and not limits[name].holds(entry):
                yield f"{kind}.{name}"


def read(name: str, data: bytes) -> None:
    """Bytes become a value within its limits, or are refused."""
    kind, from_pb, to_pb = READERS[name]
    try:
        value = from_pb(protobuf.parse(kind, data))
    except BadRequest as refusal:
        words = str(refusal)
    else:
        words = ""
        again = to_pb(value)  # raises ValueError where a number does not fit the wire
        assert again is None or list(beyond(again)) == []
    assert len(words.encode()) <= WORDS_MAX
    assert not words or words.isprintable()


THOROUGHLY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.parametrize("name", READERS)
@THOROUGHLY
@given(data=st.data())
def test_any_message_is_read_as_a_value_within_its_limits_or_refused(name: str, data: st.DataObject) -> None:
    read(name, data.draw(messages(READERS[name][0])).SerializeToString())


@pytest.mark.parametrize("name", READERS)
@THOROUGHLY
@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=b"\xff" * 64)
def test_any_bytes_are_read_as_a_value_within_its_limits_or_refused(name: str, data: bytes) -> None:
    read(name, data)


@pytest.mark.parametrize("name", READERS)
@THOROUGHLY
@given(data=st.data())
def test_a_message_with_bytes_that_changed_is_read_within_limits_or_refused(name: str, data: st.DataObject) -> None:
    whole = bytearray(data.draw(messages(READERS[name][0])).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if whole:
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    read(name, bytes(whole[: data.draw(st.integers(0, len(whole)))]))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.PushHeader(tokens=2**40 + 1), "PushHeader.tokens"),
        (pb.PushHeader(payload=pb.Payload(num_elements=2**63)), "Payload.num_elements"),
        (pb.Tensor(shape=[1] * 9), "Tensor.shape"),
        (pb.Tensor(shape=[2**62]), "Tensor.shape[]"),
        (pb.Progress(loss=float("nan")), "Progress.loss"),
        (pb.PushResponse(message="x" * 3000), "PushResponse.message"),
    ],
)
def test_this_test_knows_what_is_beyond_a_limit(message: Message, field: str) -> None:
    assert list(beyond(message)) == [field]
