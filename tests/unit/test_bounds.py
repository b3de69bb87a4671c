"""Whatever comes from outside has a limit; within it, messages become values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from diloco_common.codec import PayloadHeader
from diloco_common.errors import WORDS_MAX, BadRequest, Busy, plain, refusal_from
from diloco_common.wire import bounds, messages, protobuf
from diloco_common.wire.bounds import FieldLimit
from diloco_common.wire.by_name import limits_of
from diloco_common.wire.manifest import TensorSpec, Tie
from diloco_protos import parameter_server_pb2 as pb

FRAMES = {f"{kind}.{name}" for kind in ("PushRequest", "PullResponse") for name in ("chunk", "crc32c", "padding")}
BY_OTHER_MEANS = {
    *FRAMES,
    "Evicted.message",
    "Tensor.buffer",  # known ones alone are taken
    "Tensor.dtype",
    "Tensor.prefix",  # as long as the name before
    "PushResponse.message",
}
"""Bytes whose size the header announces, with what comes with them, and words, which are cut."""

VALUES: dict[str, type] = {
    "JoinResponse": messages.JoinAnswer, "Payload": PayloadHeader, "PushResponse": messages.PushAnswer, "Tie": Tie,
    **{kind.DESCRIPTOR.name: getattr(messages, kind.DESCRIPTOR.name) for kind in (
        pb.Collect, pb.Committed, pb.Evicted, pb.FollowRequest, pb.FragmentStatus, pb.FrozenTensor, pb.Held,
        pb.JoinRequest, pb.LearnerPolicy, pb.Leaving, pb.Near, pb.Progress, pb.PullHeader, pb.PullRequest, pb.Pulse,
        pb.PushHeader, pb.Range, pb.ShardAway,
    )},
}  # fmt: skip
READ: dict[str, Callable[[Any], object]] = {
    **{name: partial(protobuf.from_pb, kind) for name, kind in VALUES.items()},
    "Tensor": lambda tensor: protobuf.tensors_from_pb([tensor]),
    "JoinRequest": protobuf.join_request_from_pb,
    "Directive": protobuf.directive_from_pb,
}
KINDS: dict[str, type[Message]] = {name: getattr(pb, name) for name in READ}


TENSOR = {"name": bounds.TENSOR_NAME, "shape": bounds.SHAPE, "shape[]": bounds.SIZE}
LIMITS = {"Tensor": TENSOR} | {name: limits_of(kind) for name, kind in VALUES.items()}
FIELDS = [(kind, name, limit) for kind, limits in LIMITS.items() for name, limit in limits.items()]


def smallest(kind: str) -> Message:
    """A message of a kind that is taken: the least of every field that must have something."""
    message = KINDS[kind]()
    for name, limit in LIMITS.get(kind, {}).items():
        if limit.least > 0:
            put(message, name, "x" if limit.counts else limit.least)
    if kind == "JoinResponse":
        message.policy.CopyFrom(smallest("LearnerPolicy"))  # type: ignore[attr-defined]
    return message


def put(message: Message, name: str, value: Any) -> None:
    if name.endswith("[]"):
        getattr(message, name[:-2]).append(value)
    elif isinstance(value, list):
        getattr(message, name).extend(value)
    else:
        field = message.DESCRIPTOR.fields_by_name[name]
        is_float = field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE
        setattr(message, name, value if is_float or isinstance(value, str | bytes) else int(value))


def of_length(kind: str, name: str, length: int) -> Any:
    """A text of so many characters, or a list of so many entries that differ."""
    field = KINDS[kind].DESCRIPTOR.fields_by_name[name.removesuffix("[]")]
    if field.message_type is None:
        if not field.is_repeated or name.endswith("[]"):
            return b"x" * length if field.type == FieldDescriptor.TYPE_BYTES else "x" * length
        return ["x"] * length if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else [1] * length
    entries = [smallest(field.message_type.name) for _ in range(length)]
    if field.message_type.name in ("Held", "FragmentStatus"):
        for i, entry in enumerate(entries):
            entry.fragment_id = min(i, bounds.FRAGMENTS_MAX - 1)  # type: ignore[attr-defined]
    if field.message_type.name == "Range":
        for i, entry in enumerate(entries):
            entry.start, entry.stop = i, i + 1  # type: ignore[attr-defined]
    return entries


def test_every_field_of_the_protocol_has_a_limit_or_needs_none() -> None:
    needed = set()
    for kind, descriptor in pb.DESCRIPTOR.message_types_by_name.items():
        for field in descriptor.fields:
            if field.cpp_type not in (
                FieldDescriptor.CPPTYPE_BOOL, FieldDescriptor.CPPTYPE_ENUM, FieldDescriptor.CPPTYPE_MESSAGE,
            ):  # fmt: skip
                needed.add(f"{kind}.{field.name}")
                needed |= {f"{kind}.{field.name}[]"} if field.is_repeated else set()
            elif field.is_repeated:
                needed.add(f"{kind}.{field.name}")
    assert {f"{kind}.{name}" for kind, name, _ in FIELDS} == needed - BY_OTHER_MEANS


NUMBERS = [
    (kind, name, limit)
    for kind, name, limit in FIELDS
    if not limit.counts and (kind, name) not in {("Progress", "loss"), ("JoinResponse", "shard_index")}
]
each_number = pytest.mark.parametrize(("kind", "name", "limit"), NUMBERS, ids=[f"{k}.{n}" for k, n, _ in NUMBERS])


@each_number
def test_a_number_is_taken_up_to_its_limit(kind: str, name: str, limit: FieldLimit) -> None:
    for value in (limit.least, limit.most):
        message = smallest(kind)
        if kind == "Range":
            message.stop = int(bounds.ELEMENTS_MAX)  # type: ignore[attr-defined]
        if name == "part":
            message.num_parts = bounds.PARTS_MAX  # type: ignore[attr-defined]
        put(message, name, value)
        READ[kind](message)


@each_number
def test_a_number_beyond_its_limit_is_refused_by_name(kind: str, name: str, limit: FieldLimit) -> None:
    field = KINDS[kind].DESCRIPTOR.fields_by_name[name.removesuffix("[]")]
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        values = [math.nextafter(limit.most, math.inf), math.inf, math.nan, -1.0]
    elif limit.most == 2**32 - 1:  # all that the field can carry
        values = []
    else:
        values = [int(limit.most) + 1] + ([int(limit.least) - 1] if limit.least > 0 else [])
    for value in values:
        message = smallest(kind)
        put(message, name, value)
        with pytest.raises(BadRequest) as refused:
            READ[kind](message)
        said = str(refused.value)
        assert kind == "Tensor" or f"{kind}.{name.removesuffix('[]')}" in said
        assert str(value) in said
        assert bounds.number(limit.most) in said


LENGTHS = [(kind, name, limit) for kind, name, limit in FIELDS if limit.counts]


@pytest.mark.parametrize(("kind", "name", "limit"), LENGTHS, ids=[f"{k}.{n}" for k, n, _ in LENGTHS])
def test_texts_and_lists_are_taken_up_to_their_limit(kind: str, name: str, limit: FieldLimit) -> None:
    message = smallest(kind)
    put(message, name, of_length(kind, name, int(limit.most)))
    READ[kind](message)

    put(message, name, of_length(kind, name, int(limit.most) + 1))
    with pytest.raises(BadRequest, match=re.escape(f"{kind}.{name.removesuffix('[]')}")):
        READ[kind](message)


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ([(3, 3)], "from 3 to 3, which is empty"),
        ([(0, 4), (3, 5)], "from 3 after one that ends at 4"),
    ],
)
def test_ranges_ascend_and_are_disjoint(ranges: list[tuple[int, int]], says: str) -> None:
    message = [pb.Range(start=start, stop=stop) for start, stop in ranges]
    for kind in ("PushHeader", "PullRequest", "PullHeader"):
        with pytest.raises(BadRequest, match=f"{kind}.ranges has a range {says}"):
            READ[kind](KINDS[kind](ranges=message))


def answer(**wrong: Any) -> Message:
    message = smallest("JoinResponse")
    for name, value in wrong.items():
        setattr(message, name, value)
    return message


HALF = pb.Tensor(name="w", shape=[bounds.ELEMENTS_MAX // 2])
HELD = pb.Held(fragment_id=3)


@pytest.mark.parametrize(
    ("kind", "message", "says"),
    [
        ("PushHeader", pb.PushHeader(part=1), "part is 1 of 1 parts"),
        ("PushHeader", pb.PushHeader(part=2, num_parts=2), "part is 2 of 2 parts"),
        ("JoinResponse", answer(num_shards=2, shard_index=2), "shard_index is 2 of 2"),
        ("JoinRequest", pb.JoinRequest(held=[HELD, HELD]), "names a fragment twice"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(kind: str, message: Message, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        READ[kind](message)


def test_a_model_is_bounded_as_a_whole_and_counted_before_it_is_read() -> None:
    protobuf.tensors_from_pb([HALF, HALF])
    with pytest.raises(BadRequest, match=r"more than 2\^42 elements"):
        protobuf.tensors_from_pb([HALF, HALF, pb.Tensor(name="b", shape=[1])])
    with pytest.raises(BadRequest, match=r"JoinRequest\.tensors has 65537 entries"):
        next(protobuf.tensors_in_turns([pb.Tensor(name="w", shape=[1])] * (bounds.TENSORS_MAX + 1)))


@pytest.mark.parametrize("kind", sorted(bounds.MESSAGE_BYTES_MAX))
def test_a_message_that_is_too_long_is_not_parsed(kind: str) -> None:
    too_long = b"\xff" * (bounds.MESSAGE_BYTES_MAX[kind] + 1)
    with pytest.raises(BadRequest, match=f"{kind} has {len(too_long)} bytes"):
        protobuf.parse(getattr(pb, kind), too_long)


UNKNOWN = b"\xf2\x07\x00"
"""A field that no JoinRequest has: number 126, of bytes, empty."""


@pytest.mark.parametrize(
    "entry",
    [
        pb.JoinRequest(tensors=[pb.Tensor()]).SerializeToString(),
        pb.JoinRequest(decodes=[""]).SerializeToString(),
        UNKNOWN,
    ],
    ids=["tensors", "decodes", "unknown"],
)
@pytest.mark.parametrize("before", [b"", b"\xf1\x07" + bytes(8)])
def test_entries_of_a_join_are_counted_before_they_are_parsed(before: bytes, entry: bytes) -> None:
    with pytest.raises(BadRequest, match="too many entries"):
        protobuf.parse(pb.JoinRequest, before + entry * 1_000_000)


def test_an_enormous_entry_of_a_join_is_not_parsed() -> None:
    data = pb.JoinRequest(tensors=[pb.Tensor(name="deep", shape=[2] * 1_000_000)]).SerializeToString()
    with pytest.raises(BadRequest, match="one of more than 73728 bytes"):
        protobuf.parse(pb.JoinRequest, data)


def adapters(count: int) -> list[TensorSpec]:
    """Named as PEFT names them."""
    path = "base_model.model.model.layers.{}.mlp.experts.{}.{}_proj.lora_{}.default.weight"
    names = (
        path.format(layer, expert, leaf, half)
        for layer in range(96) for expert in range(128) for leaf in ("down", "gate", "up") for half in "AB"
    )  # fmt: skip
    return [TensorSpec(name, (2,)) for name in sorted(islice(names, count))]


@pytest.mark.parametrize("count", [1, 2000, 46_080, bounds.TENSORS_MAX])
def test_the_names_of_a_large_adapter_fit_a_join(count: int) -> None:
    specs = adapters(count)
    data = pb.JoinRequest(tensors=protobuf.tensors_to_pb(specs)).SerializeToString()
    message = protobuf.parse(pb.JoinRequest, data)
    assert protobuf.tensors_from_pb(message.tensors) == specs
    assert any(tensor.prefix for tensor in message.tensors) is (count > 20_000)


@pytest.mark.parametrize("prefixes", [[1], [0, 3], [0, 2, 5]])
def test_a_name_cannot_begin_with_more_than_the_one_before(prefixes: list[int]) -> None:
    with pytest.raises(BadRequest, match=r"Tensor\.prefix is \d; the name before has"):
        protobuf.tensors_from_pb([pb.Tensor(name="ab", shape=[1], prefix=n) for n in prefixes])


def test_names_that_short_messages_make_long_are_bounded_together() -> None:
    first = pb.Tensor(name="x" * bounds.TENSOR_NAME_MAX, shape=[1])
    more = [pb.Tensor(name="y", shape=[1], prefix=bounds.TENSOR_NAME_MAX - 1)] * (bounds.TENSORS_MAX - 1)
    with pytest.raises(BadRequest, match=r"more than 2\^24 characters together"):
        protobuf.tensors_from_pb([first, *more])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("plain", "plain"),
        ("two\nlines\x1b[31m\x00", "two\\nlines\\x1b[31m\\x00"),
        ("\ud800", "\\ud800"),
        ("a" * WORDS_MAX, "a" * WORDS_MAX),
        ("ö" * 5000, "ö" * ((WORDS_MAX - 3) // 2) + "…"),
    ],
)
def test_words_become_one_line_of_bounded_length(words: str, line: str) -> None:
    assert plain(words) == line
    assert len(line.encode()) <= WORDS_MAX


def test_words_are_cut_wherever_they_come_from() -> None:
    words = "x\n" * 5000
    response = pb.PushResponse(outcome=pb.PushResponse.REJECTED, code="BUSY", message=words)
    evicted = protobuf.directive_from_pb(pb.Directive(evicted=pb.Evicted(code="BUSY", message=words)))
    assert isinstance(evicted, messages.Evicted)
    for said in (
        str(Busy(words)), str(refusal_from("BUSY", words)), str(refusal_from("NEW", words)), evicted.message,
        protobuf.answer_from_pb(response).message,
    ):  # fmt: skip
        assert len(said.encode()) <= WORDS_MAX
        assert said.isprintable()
