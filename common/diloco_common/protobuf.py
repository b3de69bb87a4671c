"""Converts plain values to the protobuf messages of diloco.v1 and back. Refuses malformed messages as BadRequest.

The only file of `common` that knows the generated messages.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from diloco_common import errors
from diloco_common.codec import Payload, PayloadHeader
from diloco_common.manifest import TensorSpec
from diloco_common.messages import (
    Collect,
    Committed,
    Directive,
    Drain,
    Evicted,
    FragmentStatus,
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
    Stop,
)
from diloco_protos import parameter_server_pb2 as pb


def tensors_to_pb(tensors: Sequence[TensorSpec]) -> list[pb.Tensor]:
    return [pb.Tensor(name=t.name, shape=t.shape, mean_merge=t.mean_merge) for t in tensors]


def tensors_from_pb(tensors: Iterable[pb.Tensor]) -> list[TensorSpec]:
    """Raises BadRequest for a negative dimension."""
    specs = [TensorSpec(t.name, tuple(t.shape), t.mean_merge) for t in tensors]
    for spec in specs:
        if any(n < 0 for n in spec.shape) or not spec.name:
            raise errors.BadRequest(f"tensor {spec.name[:64]!r} has shape {list(spec.shape)}")
    return specs


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
    return [Held(h.fragment_id, h.epoch, h.version) for h in held]


def progress_to_pb(progress: Progress) -> pb.Progress:
    return pb.Progress(
        inner_step=progress.inner_step,
        tokens=progress.tokens,
        loss=progress.loss,
        step_time_s=progress.step_time_s,
    )


def progress_from_pb(progress: pb.Progress) -> Progress:
    """Raises BadRequest for an impossible step time, because other learners' grace windows depend on it."""
    if not 0 <= progress.step_time_s < float("inf"):
        raise errors.BadRequest(f"step_time_s is {progress.step_time_s}; it must be a finite number of seconds")
    loss = progress.loss if progress.HasField("loss") else None
    return Progress(progress.inner_step, progress.tokens, loss, progress.step_time_s)


def pulse_to_pb(pulse: Pulse) -> pb.Pulse:
    return pb.Pulse(tokens_merged=pulse.tokens_merged, tokens_budget=pulse.tokens_budget)


def pulse_from_pb(pulse: pb.Pulse) -> Pulse:
    return Pulse(pulse.tokens_merged, pulse.tokens_budget)


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
    """None for a kind of directive that this version does not know."""
    match directive.WhichOneof("kind"):
        case "collect":
            return Collect(directive.collect.fragment_id, directive.collect.round, directive.collect.epoch)
        case "committed":
            c = directive.committed
            return Committed(c.fragment_id, c.version, c.epoch)
        case "pulse":
            return pulse_from_pb(directive.pulse)
        case "drain":
            return Drain()
        case "stop":
            return Stop()
        case "evicted":
            return Evicted(directive.evicted.code, directive.evicted.message)
    return None


def payload_to_pb(header: PayloadHeader) -> pb.Payload:
    return pb.Payload(
        encoding=header.encoding,
        num_elements=header.num_elements,
        chunk_elements=header.chunk_elements,
        num_bytes=header.num_bytes,
        crc32c=header.crc32c,
    )


def payload_from_pb(payload: pb.Payload) -> PayloadHeader:
    return PayloadHeader(
        payload.encoding, payload.num_elements, payload.chunk_elements, payload.num_bytes, payload.crc32c
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
    )


def push_header_from_pb(header: pb.PushHeader) -> PushHeader:
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
    )


def join_request_to_pb(request: JoinRequest) -> pb.JoinRequest:
    return pb.JoinRequest(
        protocol=request.protocol,
        process_id=request.process_id,
        tensors=tensors_to_pb(request.tensors),
        decodes=request.decodes,
        observe=request.observe,
        held=held_to_pb(request.held),
    )


def join_request_from_pb(request: pb.JoinRequest) -> JoinRequest:
    """Raises BadRequest."""
    return JoinRequest(
        protocol=request.protocol,
        process_id=request.process_id,
        tensors=tuple(tensors_from_pb(request.tensors)),
        decodes=tuple(request.decodes),
        held=tuple(held_from_pb(request.held)),
        observe=request.observe,
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
    )


def join_answer_from_pb(answer: pb.JoinResponse) -> JoinAnswer:
    """Raises BadRequest."""
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
    )


def pull_request_to_pb(request: PullRequest) -> pb.PullRequest:
    message = pb.PullRequest(fragment_id=request.fragment_id, encodings=request.encodings)
    if request.have is not None:
        message.epoch, message.have_version = request.have
    return message


def pull_request_from_pb(request: pb.PullRequest) -> PullRequest:
    have = (request.epoch, request.have_version) if request.HasField("have_version") else None
    return PullRequest(request.fragment_id, tuple(request.encodings), have)


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
    )


def pull_header_from_pb(header: pb.PullHeader) -> PullHeader:
    return PullHeader(
        fragment_id=header.fragment_id,
        version=header.version,
        epoch=header.epoch,
        merged_version=header.merged_version,
        forgotten_version=header.forgotten_version,
        tokens_merged=header.tokens_merged,
        payload=payload_from_pb(header.payload) if header.HasField("payload") else None,
        base_version=header.base_version if header.HasField("base_version") else None,
    )


async def push_requests(header: PushHeader, payload: Payload) -> AsyncIterator[pb.PushRequest]:
    """The messages of one push, in order."""
    yield pb.PushRequest(header=push_header_to_pb(header))
    for chunk in payload.chunks:
        yield pb.PushRequest(chunk=chunk)


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
    outcome = _OUTCOMES_BACK.get(response.outcome, Outcome.REJECTED)
    return PushAnswer(outcome, response.code, response.message)
