"""Converts plain values to the protobuf messages of diloco.v1 and back.

The one place where messages become values. Bytes that are no message, and values beyond the limits of `bounds.py`, are
refused as BadRequest, on both sides. The only file of `common` that knows the generated messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from diloco_common import bounds, errors
from diloco_common.codec import Chunk, Payload, PayloadHeader
from diloco_common.codec.frames import chunk_in, frame_of, framed
from diloco_common.entries import has_at_most, size_of
from diloco_common.manifest import Kind, TensorSpec, buffer_spec
from diloco_common.messages import (
    Collect,
    Committed,
    Directive,
    Drain,
    Evicted,
    FragmentStatus,
    FrozenTensor,
    Held,
    JoinAnswer,
    JoinRequest,
    LearnerPolicy,
    Outcome,
    Progress,
    PullHeader,
    PullRequest,
    Pulse,
    PushAnswer,
    PushHeader,
    ShardAway,
    Stop,
    Tie,
)
from diloco_common.ranges import Range, check_ranges
from diloco_protos import parameter_server_pb2 as pb

M = TypeVar("M", bound=Message)
TURN = 2048
"""Tensors that are read in one turn."""
ON_COMMIT = ("carry", "overwrite", "blend")


def _within(message: M) -> M:
    """The message, once every field is within its limit. Raises BadRequest."""
    kind = message.DESCRIPTOR.name
    for field, limit in _LIMITS[kind]:
        value = getattr(message, field)
        if not limit.holds(value):
            raise bounds.beyond(f"{kind}.{field}", value, limit)
    for field, limit in _LIMITS_OF_ENTRIES[kind]:
        for value in getattr(message, field):
            if not limit.holds(value):
                raise bounds.beyond(f"{kind}.{field}", value, limit)
    return message


_LIMITS = {
    kind: [(field, limit) for field, limit in fields.items() if not field.endswith("[]")]
    for kind, fields in bounds.LIMITS.items()
}
_LIMITS_OF_ENTRIES = {
    kind: [(field[:-2], limit) for field, limit in fields.items() if field.endswith("[]")]
    for kind, fields in bounds.LIMITS.items()
}
_LOSS = bounds.LIMITS["Progress"]["loss"]
_LIMITS["Progress"] = [(field, limit) for field, limit in _LIMITS["Progress"] if field != "loss"]  # dropped instead


def serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def parse(kind: type[M], data: bytes | None) -> M:
    """The message of this kind that was sent; None: the call ended well, and without one. Raises BadRequest."""
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
        raise errors.BadRequest(f"{len(data)} bytes came that are no {kind.DESCRIPTOR.name} of diloco.v1") from None
    return message


def tensors_to_pb(tensors: Sequence[TensorSpec]) -> list[pb.Tensor]:
    return [_tensor_to_pb(t) for t in tensors]


def _tensor_to_pb(t: TensorSpec) -> pb.Tensor:
    if t.kind == "buffer":
        return pb.Tensor(name=t.name, shape=t.shape, buffer=t.rule, dtype=t.dtype)
    return pb.Tensor(name=t.name, shape=t.shape, mean_merge=t.rule == "mean", companion=t.companion)


def tensors_from_pb(tensors: Sequence[pb.Tensor]) -> list[TensorSpec]:
    """Raises BadRequest."""
    return [spec for some in tensors_in_turns(tensors) for spec in some]


def tensors_in_turns(tensors: Sequence[pb.Tensor]) -> Iterator[list[TensorSpec]]:
    """The tensors in order, some at a time: the largest model takes longer than others should wait.

    Raises BadRequest.
    """
    bounds.check("JoinRequest", "tensors", tensors)
    elements = 0
    for start in range(0, len(tensors), TURN):
        specs = [_tensor_from_pb(tensor) for tensor in tensors[start : start + TURN]]
        elements += sum(spec.num_elements for spec in specs)
        if elements > bounds.ELEMENTS_MAX:
            raise errors.BadRequest(
                f"the tensors have more than {bounds.number(bounds.ELEMENTS_MAX)} elements; larger models are not taken"
            )
        yield specs


def _tensor_from_pb(tensor: pb.Tensor) -> TensorSpec:
    name, shape = tensor.name, tensor.shape
    if not 0 < len(name) <= bounds.TENSOR_NAME_MAX:
        raise bounds.beyond("Tensor.name", name, bounds.LIMITS["Tensor"]["name"])
    if len(shape) > bounds.DIMENSIONS_MAX:
        raise bounds.beyond("Tensor.shape", shape, bounds.LIMITS["Tensor"]["shape"])
    if tensor.buffer:
        try:
            spec = buffer_spec(name, tuple(shape), tensor.buffer, tensor.dtype)
        except ValueError as error:
            raise errors.BadRequest(f"{error}; a newer release of decoupled-diloco may know it") from None
    else:
        kind: Kind = "momentum" if tensor.companion else "parameter"
        spec = TensorSpec(name, tuple(shape), "mean" if tensor.mean_merge else "run", kind)
    for n in spec.shape:
        if not 0 <= n <= bounds.ELEMENTS_MAX:
            raise errors.BadRequest(
                f"tensor {name[:64]!r} has shape {list(spec.shape)}; "
                f"0 to {bounds.number(bounds.ELEMENTS_MAX)} are taken for each dimension"
            )
    return spec


def policy_to_pb(policy: LearnerPolicy) -> pb.LearnerPolicy:
    return pb.LearnerPolicy(
        sync_every=policy.sync_every,
        push_encoding=policy.push_encoding,
        pull_encoding=policy.pull_encoding,
        on_commit=policy.on_commit,
        blend_alpha=policy.blend_alpha,
        error_feedback=policy.error_feedback,
    )


def policy_from_pb(policy: pb.LearnerPolicy) -> LearnerPolicy:
    """Raises BadRequest."""
    _within(policy)
    if policy.on_commit not in ON_COMMIT:
        raise errors.BadRequest(f"LearnerPolicy.on_commit is {policy.on_commit!r}, none of {', '.join(ON_COMMIT)}")
    return LearnerPolicy(
        policy.sync_every,
        policy.push_encoding,
        policy.pull_encoding,
        policy.on_commit,
        policy.blend_alpha,
        policy.error_feedback,
    )


def status_to_pb(status: FragmentStatus) -> pb.FragmentStatus:
    return pb.FragmentStatus(
        fragment_id=status.fragment_id,
        seeded=status.seeded,
        version=status.version,
        merged_version=status.merged_version,
        epoch=status.epoch,
        forgotten_version=status.forgotten_version,
    )


def status_from_pb(status: pb.FragmentStatus) -> FragmentStatus:
    """Raises BadRequest."""
    _within(status)
    return FragmentStatus(
        status.fragment_id,
        status.seeded,
        status.version,
        status.merged_version,
        status.epoch,
        status.forgotten_version,
    )


def held_to_pb(held: Iterable[Held]) -> list[pb.Held]:
    return [pb.Held(fragment_id=h.fragment_id, epoch=h.epoch, version=h.version) for h in held]


def held_from_pb(held: Iterable[pb.Held]) -> list[Held]:
    """Raises BadRequest, also where two are of one fragment."""
    found = [Held(h.fragment_id, h.epoch, h.version) for h in map(_within, held)]
    if len({h.fragment_id for h in found}) < len(found):
        raise errors.BadRequest("JoinRequest.held names a fragment twice; name the version that is held")
    return found


def frozen_to_pb(frozen: Iterable[FrozenTensor]) -> list[pb.FrozenTensor]:
    return [pb.FrozenTensor(name=t.name, form=t.form, crc32c=t.crc32c) for t in frozen]


def frozen_from_pb(frozen: Iterable[pb.FrozenTensor]) -> list[FrozenTensor]:
    """Raises BadRequest."""
    return [FrozenTensor(t.name, t.form, t.crc32c if t.HasField("crc32c") else None) for t in map(_within, frozen)]


def ties_to_pb(ties: Iterable[Tie]) -> list[pb.Tie]:
    return [pb.Tie(name=t.name, of=t.of) for t in ties]


def ties_from_pb(ties: Iterable[pb.Tie]) -> list[Tie]:
    """Raises BadRequest."""
    return [Tie(t.name, t.of) for t in map(_within, ties)]


def progress_to_pb(progress: Progress) -> pb.Progress:
    """A step time beyond the limit is sent as the limit: a machine may have slept for a month."""
    return pb.Progress(
        inner_step=progress.inner_step,
        tokens=progress.tokens,
        loss=progress.loss,
        step_time_s=min(progress.step_time_s, bounds.STEP_TIME_MAX_S),
        away=[
            pb.ShardAway(
                address=shard.address[: bounds.ADDRESS_MAX], index=shard.index,
                for_s=min(shard.for_s, bounds.STEP_TIME_MAX_S),
            )
            for shard in progress.away[: bounds.AWAY_MAX]
        ],
        counts_samples=progress.counts_samples,
        leaving=None if progress.last_rounds is None else pb.Leaving(fragment_ids=sorted(progress.last_rounds)),
    )  # fmt: skip


def progress_from_pb(progress: pb.Progress) -> Progress:
    """A loss beyond its limit is taken as absent, as it only is to be looked at. Raises BadRequest."""
    _within(progress)
    loss = progress.loss if progress.HasField("loss") and _LOSS.holds(progress.loss) else None
    away = tuple(
        ShardAway(shard.address, shard.index if shard.HasField("index") else None, shard.for_s)
        for shard in map(_within, progress.away)
    )
    last_rounds = frozenset(_within(progress.leaving).fragment_ids) if progress.HasField("leaving") else None
    return Progress(
        progress.inner_step, progress.tokens, loss, progress.step_time_s, away, progress.counts_samples, last_rounds
    )  # fmt: skip


def pulse_to_pb(pulse: Pulse) -> pb.Pulse:
    return pb.Pulse(
        tokens_merged=pulse.tokens_merged, tokens_budget=pulse.tokens_budget, learners_alive=pulse.learners_alive
    )


def pulse_from_pb(pulse: pb.Pulse) -> Pulse:
    """Raises BadRequest."""
    _within(pulse)
    return Pulse(pulse.tokens_merged, pulse.tokens_budget, pulse.learners_alive)


def directive_to_pb(directive: Directive) -> pb.Directive:
    match directive:
        case Collect():
            return pb.Directive(
                collect=pb.Collect(fragment_id=directive.fragment_id, round=directive.round, epoch=directive.epoch)
            )
        case Committed():
            return pb.Directive(
                committed=pb.Committed(
                    fragment_id=directive.fragment_id, version=directive.version, epoch=directive.epoch
                )
            )
        case Pulse():
            return pb.Directive(pulse=pulse_to_pb(directive))
        case Drain():
            return pb.Directive(drain=pb.Drain())
        case Stop():
            return pb.Directive(stop=pb.Stop())
        case Evicted():
            return pb.Directive(evicted=pb.Evicted(code=directive.code, message=directive.message))


def directive_from_pb(directive: pb.Directive) -> Directive | None:
    """None for a kind of directive that this version does not know. Raises BadRequest."""
    match directive.WhichOneof("kind"):
        case "collect":
            c = _within(directive.collect)
            return Collect(c.fragment_id, c.round, c.epoch)
        case "committed":
            v = _within(directive.committed)
            return Committed(v.fragment_id, v.version, v.epoch)
        case "pulse":
            return pulse_from_pb(directive.pulse)
        case "drain":
            return Drain()
        case "stop":
            return Stop()
        case "evicted":
            e = _within(directive.evicted)
            return Evicted(e.code, errors.plain(e.message))
    return None


def ranges_to_pb(ranges: Iterable[Range]) -> list[pb.Range]:
    return [pb.Range(start=start, stop=stop) for start, stop in ranges]


def ranges_from_pb(message: pb.PushHeader | pb.PullRequest | pb.PullHeader) -> tuple[Range, ...]:
    """The ranges of a message that is within its limits. Raises BadRequest."""
    ranges = tuple(Range(r.start, r.stop) for r in map(_within, message.ranges))
    check_ranges(f"{message.DESCRIPTOR.name}.ranges", ranges)
    return ranges


def payload_to_pb(header: PayloadHeader) -> pb.Payload:
    return pb.Payload(
        encoding=header.encoding,
        num_elements=header.num_elements,
        chunk_elements=header.chunk_elements,
        num_bytes=header.num_bytes,
        chunks_crc32c=header.chunks_crc32c,
    )


def payload_from_pb(payload: pb.Payload) -> PayloadHeader:
    """Raises BadRequest. What the sizes mean for a fragment, `codec.check_header` says."""
    _within(payload)
    return PayloadHeader(
        payload.encoding, payload.num_elements, payload.chunk_elements, payload.num_bytes, payload.chunks_crc32c
    )


def push_header_to_pb(header: PushHeader) -> pb.PushHeader:
    return pb.PushHeader(
        fragment_id=header.fragment_id,
        round=header.round,
        epoch=header.epoch,
        base_version=header.base_version,
        tokens=header.tokens,
        steps=header.steps,
        payload=payload_to_pb(header.payload),
        manifest_digest=header.manifest_digest,
        tokens_merged=header.tokens_merged,
        not_finite=header.not_finite,
        part=header.part,
        num_parts=header.num_parts,
        ranges=ranges_to_pb(header.ranges),
    )


def push_header_from_pb(header: pb.PushHeader) -> PushHeader:
    """Raises BadRequest."""
    _within(header)
    num_parts = max(header.num_parts, 1)
    if header.part >= num_parts:
        raise errors.BadRequest(f"PushHeader.part is {header.part} of {num_parts} parts; they count from 0")
    return PushHeader(
        fragment_id=header.fragment_id,
        round=header.round,
        epoch=header.epoch,
        base_version=header.base_version,
        tokens=header.tokens,
        steps=header.steps,
        payload=payload_from_pb(header.payload),
        manifest_digest=header.manifest_digest,
        tokens_merged=header.tokens_merged,
        not_finite=header.not_finite,
        part=header.part,
        num_parts=num_parts,
        ranges=ranges_from_pb(header),
    )


def join_request_to_pb(request: JoinRequest) -> pb.JoinRequest:
    return pb.JoinRequest(
        protocol=request.protocol,
        process_id=request.process_id,
        tensors=tensors_to_pb(request.tensors),
        decodes=request.decodes,
        observe=request.observe,
        held=held_to_pb(request.held),
        frozen=frozen_to_pb(request.frozen),
        ties=ties_to_pb(request.ties),
        index=request.index,
        take_number=request.take_number,
        age_s=min(request.age_s, bounds.AGE_MAX_S),
    )


def join_request_from_pb(request: pb.JoinRequest, tensors: Sequence[TensorSpec] | None = None) -> JoinRequest:
    """`tensors`: those of the request, if they were read in turns before. Raises BadRequest."""
    _within(request)
    return JoinRequest(
        protocol=request.protocol,
        process_id=request.process_id,
        tensors=tuple(tensors_from_pb(request.tensors) if tensors is None else tensors),
        decodes=tuple(request.decodes),
        held=tuple(held_from_pb(request.held)),
        observe=request.observe,
        frozen=tuple(frozen_from_pb(request.frozen)),
        ties=tuple(ties_from_pb(request.ties)),
        index=request.index if request.HasField("index") else None,
        take_number=request.take_number,
        age_s=request.age_s,
    )


def join_answer_to_pb(answer: JoinAnswer) -> pb.JoinResponse:
    return pb.JoinResponse(
        generation=answer.generation,
        epoch=answer.epoch,
        heartbeat_s=answer.heartbeat_s,
        shard_index=answer.shard_index,
        num_shards=answer.num_shards,
        num_fragments=answer.num_fragments,
        manifest_digest=answer.manifest_digest,
        policy=policy_to_pb(answer.policy),
        fragments=[status_to_pb(s) for s in answer.fragments],
        pulse=pulse_to_pb(answer.pulse),
        tensors=tensors_to_pb(answer.tensors),
        ties=ties_to_pb(answer.ties),
        index=answer.index,
        rules=answer.rules,
    )


def join_answer_from_pb(answer: pb.JoinResponse) -> JoinAnswer:
    """Raises BadRequest."""
    _within(answer)
    if answer.shard_index >= answer.num_shards:
        raise errors.BadRequest(f"JoinResponse.shard_index is {answer.shard_index} of {answer.num_shards} shards")
    return JoinAnswer(
        generation=answer.generation,
        epoch=answer.epoch,
        heartbeat_s=answer.heartbeat_s,
        shard_index=answer.shard_index,
        num_shards=answer.num_shards,
        num_fragments=answer.num_fragments,
        manifest_digest=answer.manifest_digest,
        policy=policy_from_pb(answer.policy),
        fragments=tuple(status_from_pb(s) for s in answer.fragments),
        pulse=pulse_from_pb(answer.pulse),
        tensors=tuple(tensors_from_pb(answer.tensors)),
        ties=tuple(ties_from_pb(answer.ties)),
        index=answer.index,
        rules=answer.rules,
    )


def pull_request_to_pb(request: PullRequest) -> pb.PullRequest:
    message = pb.PullRequest(
        fragment_id=request.fragment_id, encodings=request.encodings, ranges=ranges_to_pb(request.ranges)
    )
    if request.have is not None:
        message.epoch, message.have_version = request.have
    if request.want is not None:
        message.want_epoch, message.want_version = request.want
    return message


def pull_request_from_pb(request: pb.PullRequest) -> PullRequest:
    """Raises BadRequest."""
    _within(request)
    have = (request.epoch, request.have_version) if request.HasField("have_version") else None
    want = (request.want_epoch, request.want_version) if request.HasField("want_version") else None
    return PullRequest(request.fragment_id, tuple(request.encodings), have, want, ranges_from_pb(request))


def pull_header_to_pb(header: PullHeader) -> pb.PullHeader:
    return pb.PullHeader(
        fragment_id=header.fragment_id,
        version=header.version,
        epoch=header.epoch,
        payload=None if header.payload is None else payload_to_pb(header.payload),
        merged_version=header.merged_version,
        tokens_merged=header.tokens_merged,
        base_version=header.base_version,
        forgotten_version=header.forgotten_version,
        ranges=ranges_to_pb(header.ranges),
    )


def pull_header_from_pb(header: pb.PullHeader) -> PullHeader:
    """Raises BadRequest."""
    _within(header)
    return PullHeader(
        fragment_id=header.fragment_id,
        version=header.version,
        epoch=header.epoch,
        merged_version=header.merged_version,
        forgotten_version=header.forgotten_version,
        tokens_merged=header.tokens_merged,
        payload=payload_from_pb(header.payload) if header.HasField("payload") else None,
        base_version=header.base_version if header.HasField("base_version") else None,
        ranges=ranges_from_pb(header),
    )


def push_requests(header: PushHeader, payload: Payload) -> Iterator[bytes]:
    """The messages of one push, in order."""
    yield push_request(header)
    yield from map(push_request, payload.chunks)


def push_request(part: PushHeader | Chunk) -> bytes:
    """One message of a push."""
    if isinstance(part, PushHeader):
        return serialize(pb.PushRequest(header=push_header_to_pb(part)))
    return frame_of(part)


def push_part(data: bytes) -> PushHeader | Chunk:
    """What one message of a push brings. A chunk is not checked yet. Raises BadRequest."""
    chunk = chunk_in(data) if len(data) <= bounds.MESSAGE_BYTES_MAX["PushRequest"] else None
    if chunk is not None:
        return chunk
    message = _other_part(pb.PushRequest, data)
    return push_header_from_pb(message.header) if message.HasField("header") else _chunk_of(message)


def pull_response(part: PullHeader | Chunk) -> bytes:
    """One message of the answer to a pull."""
    if isinstance(part, PullHeader):
        return serialize(pb.PullResponse(header=pull_header_to_pb(part)))
    return frame_of(part)


def pull_part(data: bytes) -> PullHeader | Chunk:
    """What one message of the answer to a pull brings. A chunk is not checked yet. Raises BadRequest."""
    chunk = chunk_in(data) if len(data) <= bounds.MESSAGE_BYTES_MAX["PullResponse"] else None
    if chunk is not None:
        return chunk
    message = _other_part(pb.PullResponse, data)
    return pull_header_from_pb(message.header) if message.HasField("header") else _chunk_of(message)


def _other_part(kind: type[M], data: bytes) -> M:
    """A header, or a chunk in a message that others have made. Raises BadRequest."""
    header_bytes = size_of(data, 1, bounds.PART_FIELDS_MAX)
    if header_bytes is None or header_bytes > bounds.HEADER_BYTES_MAX:
        raise errors.BadRequest(
            f"{kind.DESCRIPTOR.name} has a header of more than {bounds.HEADER_BYTES_MAX} bytes, or more than "
            f"{bounds.PART_FIELDS_MAX} fields"
        )
    return parse(kind, data)


def _chunk_of(message: pb.PushRequest | pb.PullResponse) -> Chunk:
    """Copied into a frame of our own, where it is aligned."""
    if not message.HasField("crc32c"):
        raise errors.BadRequest(f"{message.DESCRIPTOR.name} has neither a header nor a chunk with its crc32c")
    return framed(message.chunk, message.crc32c)


_OUTCOMES = {
    Outcome.ACCEPTED: pb.PushResponse.ACCEPTED,
    Outcome.DUPLICATE: pb.PushResponse.DUPLICATE,
    Outcome.LATE: pb.PushResponse.LATE,
    Outcome.REJECTED: pb.PushResponse.REJECTED,
}
_OUTCOMES_BACK = {value: outcome for outcome, value in _OUTCOMES.items()}


def answer_to_pb(answer: PushAnswer) -> pb.PushResponse:
    return pb.PushResponse(outcome=_OUTCOMES[answer.outcome], code=answer.code, message=answer.message)


def answer_from_pb(response: pb.PushResponse) -> PushAnswer:
    """Raises BadRequest."""
    _within(response)
    outcome = _OUTCOMES_BACK.get(response.outcome, Outcome.REJECTED)
    return PushAnswer(outcome, response.code, errors.plain(response.message))
