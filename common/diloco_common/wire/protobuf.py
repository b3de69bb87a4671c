"""Converts the messages of diloco.v1 between bytes and plain values.

This is the only place that does so. Both sides refuse bytes that are not a message, and values beyond their
limits, as BadRequest. Most messages are converted by field names (`by_name.py`). Tensors (there are many), frames
of chunks, and the kinds of a directive are converted by hand.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from diloco_common import errors
from diloco_common.codec import Chunk, Payload
from diloco_common.codec.frames import chunk_in, frame_of, framed
from diloco_common.wire import bounds
from diloco_common.wire.bounds import has_at_most, size_of
from diloco_common.wire.by_name import Converter, Field
from diloco_common.wire.manifest import Kind, TensorSpec, buffer_spec, check_tensor
from diloco_common.wire.messages import (
    Collect,
    Committed,
    Directive,
    Drain,
    Evicted,
    FollowRequest,
    JoinAnswer,
    JoinRequest,
    Leaving,
    Outcome,
    Progress,
    PullHeader,
    PullRequest,
    Pulse,
    PushAnswer,
    PushHeader,
    Stop,
    check_ranges,
)
from diloco_protos import parameter_server_pb2 as pb

M = TypeVar("M", bound=Message)
V = TypeVar("V", PushHeader, PullRequest, PullHeader)
W = TypeVar("W", Evicted, PushAnswer)
H = TypeVar("H", PushHeader, PullHeader)
NAMES_LONG = 1 << 20
"""If tensor names have this many characters in all, prefixes are used. 65,536 names of adapters then take 2 MB."""
TURN = 2048
"""Tensors read in one turn."""
DIRECTIVES: dict[str, type[Directive]] = {
    "collect": Collect, "committed": Committed, "pulse": Pulse, "drain": Drain, "stop": Stop, "evicted": Evicted,
}  # fmt: skip
_KIND_OF_DIRECTIVE = {directive: kind for kind, directive in DIRECTIVES.items()}


def serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def parse(kind: type[M], data: bytes | None) -> M:
    """The message of this kind. If `data` is None, the call ended well, but without a message. Raises BadRequest."""
    if data is None:
        raise errors.BadRequest(f"the call ended without the {kind.DESCRIPTOR.name} of diloco.v1 that answers it")
    limit = bounds.MESSAGE_BYTES_MAX.get(kind.DESCRIPTOR.name, math.inf)
    if len(data) > limit:
        raise errors.BadRequest(f"{kind.DESCRIPTOR.name} has {len(data)} bytes; at most {limit} are taken")
    is_join = kind is pb.JoinRequest or kind is pb.JoinResponse
    if is_join and not has_at_most(data, bounds.JOIN_ENTRIES_MAX, bounds.JOIN_ENTRY_BYTES_MAX):
        raise errors.BadRequest(
            f"{kind.DESCRIPTOR.name} has too many entries (more than {bounds.JOIN_ENTRIES_MAX}), or one of more than "
            f"{bounds.JOIN_ENTRY_BYTES_MAX} bytes; at most {bounds.TENSORS_MAX} tensors are taken"
        )
    try:
        message: M = kind.FromString(data)
    except DecodeError:
        raise errors.BadRequest(
            f"received {len(data)} bytes that are not a valid diloco.v1.{kind.DESCRIPTOR.name}"
        ) from None
    return message


def tensors_to_pb(tensors: Sequence[TensorSpec]) -> list[pb.Tensor]:
    """If the names together are long, each omits the prefix that it shares with the previous one."""
    if sum(len(t.name) for t in tensors) < NAMES_LONG:
        return [_tensor_to_pb(t, 0) for t in tensors]
    names = ["", *(t.name for t in tensors)]
    return [_tensor_to_pb(t, _in_common(before, t.name)) for before, t in zip(names, tensors, strict=False)]


def _in_common(before: str, name: str) -> int:
    """Length of their common prefix."""
    return bisect_left(range(1, min(len(before), len(name)) + 1), 1, key=lambda n: before[:n] != name[:n])


def _tensor_to_pb(t: TensorSpec, prefix: int) -> pb.Tensor:
    name = t.name[prefix:]
    if t.kind == "buffer":
        return pb.Tensor(name=name, shape=t.shape, buffer=t.rule, dtype=t.dtype, prefix=prefix)
    is_mean, is_companion = t.rule == "mean", t.kind == "momentum"
    return pb.Tensor(name=name, shape=t.shape, mean_merge=is_mean, companion=is_companion, prefix=prefix)


def tensors_from_pb(tensors: Sequence[pb.Tensor]) -> list[TensorSpec]:
    """Raises BadRequest."""
    return [spec for some in tensors_in_turns(tensors) for spec in some]


def tensors_in_turns(tensors: Sequence[pb.Tensor]) -> Iterator[list[TensorSpec]]:
    """The tensors in order, some at a time: others should not wait for all of a large model. Raises BadRequest."""
    bounds.check("JoinRequest.tensors", tensors, bounds.TENSORS)
    elements = characters = 0
    before = ""
    for start in range(0, len(tensors), TURN):
        specs = []
        for tensor in tensors[start : start + TURN]:
            specs.append(_tensor_from_pb(tensor, before))
            before = specs[-1].name
        elements += sum(spec.num_elements for spec in specs)
        characters += sum(len(spec.name) for spec in specs)
        if characters > bounds.TENSOR_NAMES_MAX:
            most = bounds.number(bounds.TENSOR_NAMES_MAX)
            raise errors.BadRequest(f"the names of the tensors have more than {most} characters together")
        if elements > bounds.ELEMENTS_MAX:
            raise errors.BadRequest(
                f"the tensors have more than {bounds.number(bounds.ELEMENTS_MAX)} elements; larger models are not taken"
            )
        yield specs


def _tensor_from_pb(tensor: pb.Tensor, before: str) -> TensorSpec:
    if tensor.prefix > len(before):
        raise errors.BadRequest(f"Tensor.prefix is {tensor.prefix}; the name before has {len(before)} characters")
    name, shape = before[: tensor.prefix] + tensor.name, tuple(tensor.shape)
    if tensor.buffer:
        try:
            spec = buffer_spec(name, shape, tensor.buffer, tensor.dtype)
        except ValueError as error:
            raise errors.BadRequest(f"{error}; a newer release of decoupled-diloco may know it") from None
    else:
        kind: Kind = "momentum" if tensor.companion else "parameter"
        spec = TensorSpec(name, shape, "mean" if tensor.mean_merge else "run", kind)
    check_tensor(spec)
    return spec


# ------------------------------------------------------------ checks beyond single fields


def _check_push(header: PushHeader) -> PushHeader:
    num_parts = max(header.num_parts, 1)
    if header.part >= num_parts:
        raise errors.BadRequest(f"PushHeader.part is {header.part} of {num_parts} parts; they count from 0")
    return _check_ranges(header if header.num_parts else replace(header, num_parts=1))


def _check_ranges(value: V) -> V:
    check_ranges(f"{type(value).__name__}.ranges", value.ranges)
    return value


def _check_join(request: JoinRequest) -> JoinRequest:
    if len({held.fragment_id for held in request.held}) < len(request.held):
        raise errors.BadRequest("JoinRequest.held names a fragment twice; name only the version that is held")
    return request


def _check_answer(answer: JoinAnswer) -> JoinAnswer:
    if answer.shard_index >= answer.num_shards:
        raise errors.BadRequest(f"JoinResponse.shard_index is {answer.shard_index} of {answer.num_shards} shards")
    return answer


def _plain(value: W) -> W:
    """Clean the text of a refusal, which may quote any caller."""
    return replace(value, message=errors.plain(value.message))


def _outcome(answer: PushAnswer) -> PushAnswer:
    """An unknown outcome counts as a rejection: nothing is merged."""
    return _plain(answer if answer.outcome else replace(answer, outcome=Outcome.REJECTED))


_BY_HAND = (
    (JoinRequest, Field("tensors", lambda _: (), lambda tensors: {"tensors": tensors_to_pb(tensors)})),
    (
        JoinRequest,
        Field("age_s", lambda message: message.age_s, lambda age_s: {"age_s": min(age_s, bounds.TIME_MAX_S)}),
    ),
    (
        JoinAnswer,
        Field(
            "tensors", lambda message: tuple(tensors_from_pb(message.tensors)),
            lambda tensors: {"tensors": tensors_to_pb(tensors)},
        ),
    ),
    (
        Progress,
        Field(
            "last_rounds",
            lambda message: frozenset(_CONVERTER.from_pb(Leaving, message.leaving).fragment_ids)
            if message.HasField("leaving") else None,
            lambda ids: {"leaving": None if ids is None else pb.Leaving(fragment_ids=sorted(ids))},
        ),
    ),
)  # fmt: skip
_CONVERTER: Converter = Converter(
    {(kind, field.name): field for kind, field in _BY_HAND},
    {
        PushHeader: _check_push, PullRequest: _check_ranges, PullHeader: _check_ranges,
        JoinRequest: _check_join, JoinAnswer: _check_answer, Evicted: _plain, PushAnswer: _outcome,
    },
)  # fmt: skip
to_pb = _CONVERTER.to_pb
from_pb = _CONVERTER.from_pb

# ------------------------------------------------------------ messages


pull_request_from_pb: Callable[[pb.PullRequest], PullRequest] = partial(from_pb, PullRequest)
join_answer_to_pb: Callable[[JoinAnswer], pb.JoinResponse] = to_pb
join_answer_from_pb: Callable[[pb.JoinResponse], JoinAnswer] = partial(from_pb, JoinAnswer)
progress_from_pb: Callable[[pb.Progress], Progress] = partial(from_pb, Progress)
follow_request_from_pb: Callable[[pb.FollowRequest], FollowRequest] = partial(from_pb, FollowRequest)
answer_to_pb: Callable[[PushAnswer], pb.PushResponse] = to_pb
answer_from_pb: Callable[[pb.PushResponse], PushAnswer] = partial(from_pb, PushAnswer)


def join_request_from_pb(request: pb.JoinRequest, tensors: Sequence[TensorSpec] | None = None) -> JoinRequest:
    """`tensors`: the request's, if they were already read in turns. Raises BadRequest."""
    read = from_pb(JoinRequest, request)
    return replace(read, tensors=tuple(tensors_from_pb(request.tensors) if tensors is None else tensors))


def progress_to_pb(progress: Progress) -> pb.Progress:
    """A time beyond the limit is sent as the limit: a machine may have slept for a month."""
    away = [
        replace(shard, address=shard.address[: bounds.ADDRESS_MAX], for_s=min(shard.for_s, bounds.TIME_MAX_S))
        for shard in progress.away[: bounds.AWAY_MAX]
    ]
    step_time_s, fail_s = (min(s, bounds.TIME_MAX_S) for s in (progress.step_time_s, progress.pushes_fail_s))
    why = errors.plain(progress.pushes_fail_why)
    said = replace(progress, step_time_s=step_time_s, away=tuple(away), pushes_fail_why=why, pushes_fail_s=fail_s)
    message: pb.Progress = to_pb(said)
    return message


def directive_to_pb(directive: Directive) -> pb.Directive:
    return pb.Directive(**{_KIND_OF_DIRECTIVE[type(directive)]: to_pb(directive)})


def directive_from_pb(directive: pb.Directive) -> Directive | None:
    """None for an unknown kind of directive. Raises BadRequest."""
    kind = directive.WhichOneof("kind")
    return from_pb(DIRECTIVES[kind], getattr(directive, kind)) if kind in DIRECTIVES else None


def push_requests(header: PushHeader, payload: Payload) -> Iterator[bytes]:
    yield push_request(header)
    yield from map(push_request, payload.chunks)


def push_request(part: PushHeader | Chunk) -> bytes:
    return serialize(pb.PushRequest(header=to_pb(part))) if isinstance(part, PushHeader) else frame_of(part)


def pull_response(part: PullHeader | Chunk) -> bytes:
    return serialize(pb.PullResponse(header=to_pb(part))) if isinstance(part, PullHeader) else frame_of(part)


def push_part(data: bytes) -> PushHeader | Chunk:
    """The content of one message of a push. A chunk is not checked yet. Raises BadRequest."""
    return _part(pb.PushRequest, PushHeader, data)


def pull_part(data: bytes) -> PullHeader | Chunk:
    """The content of one message of the answer to a pull. A chunk is not checked yet. Raises BadRequest."""
    return _part(pb.PullResponse, PullHeader, data)


def _part(kind: type[pb.PushRequest] | type[pb.PullResponse], header: type[H], data: bytes) -> H | Chunk:
    name = kind.DESCRIPTOR.name
    chunk = chunk_in(data) if len(data) <= bounds.MESSAGE_BYTES_MAX[name] else None
    if chunk is not None:
        return chunk
    header_bytes = size_of(data, 1, bounds.PART_FIELDS_MAX)
    if header_bytes is None or header_bytes > bounds.HEADER_BYTES_MAX:
        raise errors.BadRequest(
            f"{name} has a header of more than {bounds.HEADER_BYTES_MAX} bytes, or more than {bounds.PART_FIELDS_MAX} "
            "fields"
        )
    message = parse(kind, data)
    if message.HasField("header"):
        return from_pb(header, message.header)
    if not message.HasField("crc32c"):
        raise errors.BadRequest(f"{name} has neither a header nor a chunk with its crc32c")
    return framed(message.chunk, message.crc32c)  # a copy, in which the chunk is aligned
