"""Whatever a message of the fuzzer says: reading it gives a value within the limits, or a BadRequest."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from diloco_common.errors import WORDS_MAX, BadRequest
from diloco_common.wire import protobuf
from diloco_common.wire.bounds import LIMITS, FieldLimit
from diloco_protos import parameter_server_pb2 as pb

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

import messages

Kind = type[Message]
READERS: dict[Kind, tuple[Callable[[Any], Any], Callable[[Any], Message]]] = {
    pb.JoinRequest: (protobuf.join_request_from_pb, protobuf.join_request_to_pb),
    pb.JoinResponse: (protobuf.join_answer_from_pb, protobuf.join_answer_to_pb),
    pb.Progress: (protobuf.progress_from_pb, protobuf.progress_to_pb),
    pb.Directive: (protobuf.directive_from_pb, lambda d: protobuf.directive_to_pb(d) if d else pb.Directive()),
    pb.PushHeader: (protobuf.push_header_from_pb, protobuf.push_header_to_pb),
    pb.PushResponse: (protobuf.answer_from_pb, protobuf.answer_to_pb),
    pb.PullRequest: (protobuf.pull_request_from_pb, protobuf.pull_request_to_pb),
    pb.PullHeader: (protobuf.pull_header_from_pb, protobuf.pull_header_to_pb),
}
"""Message -> what makes a value of it, and what makes a message of that."""
WORDS = FieldLimit(WORDS_MAX, 0, "characters")
"""Of a refusal: they are cut."""


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


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_any_message_is_read_as_a_value_within_its_limits_or_refused(kind: Kind) -> None:
    from_pb, to_pb = READERS[kind]
    chance, seen = random.Random(kind.DESCRIPTOR.name), Counter[str]()
    for _ in range(1000):
        try:
            value = from_pb(protobuf.parse(kind, messages.body(chance, kind)))
        except BadRequest as refusal:
            words = str(refusal)
        else:
            words = ""
            again = to_pb(value)  # raises ValueError where a number does not fit the wire
            assert list(beyond(again)) == []
        assert len(words.encode()) <= WORDS_MAX
        assert not words or words.isprintable()
        seen["refused" if words else "value"] += 1
    assert seen["refused"] > 50
    assert seen["value"] > 50 or kind is pb.JoinResponse, "that one needs too much to be right by chance"
