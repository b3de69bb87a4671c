"""The conventions of diloco.v1 on gRPC: identity, error codes, limits, and plain values <-> protobuf.

The only file of `common` that knows grpc and the generated messages.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from diloco_common import errors
from diloco_common.codec import Payload, PayloadHeader, encoding_names
from diloco_common.manifest import TensorSpec
from diloco_common.messages import (
    Collect,
    Committed,
    Directive,
    Drain,
    Evicted,
    FragmentStatus,
    Held,
    LearnerPolicy,
    Outcome,
    Progress,
    Pulse,
    PushAnswer,
    PushHeader,
    Stop,
)
from diloco_protos import parameter_server_pb2 as pb

PROTOCOL = 1
MAX_MESSAGE_BYTES = 20 << 20
"""Above the largest chunk (4 Mi float32 elements) and the largest model description."""
CODE_KEY = "diloco-code"
EOF = grpc.aio.EOF
"""What reading a stream gives at its end."""
DECODES = encoding_names()
"""Encodings that this build decodes."""

SLOWEST_BYTES_PER_S = 50_000
"""A transfer that is slower than this is given up and tried again; 0.4 Mbit/s."""
PUSHES_AT_ONCE = 4
"""Of one learner to one shard. More would share a thin link so finely that none of them moves."""


def _keepalive(every_ms: int, timeout_ms: int) -> list[tuple[str, int]]:
    """Without `ping_timeout_ms` a frozen peer is noticed after a minute, whatever the other two say."""
    return [
        ("grpc.keepalive_time_ms", every_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


_SIZES = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
]
_CHANNEL = [
    *_SIZES,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # channels to one address share a connection otherwise
    ("grpc.enable_retries", 0),
]
CHANNEL_OPTIONS = [*_CHANNEL, ("grpc.max_reconnect_backoff_ms", 2_000), *_keepalive(2_000, 3_000)]
"""Of a control channel: a frozen shard is noticed after about 3 s."""
BULK_CHANNEL_OPTIONS = [*_CHANNEL, ("grpc.max_reconnect_backoff_ms", 4_000), *_keepalive(10_000, 30_000)]
"""Of a channel for pushes or pulls: on a thin link a ping waits for seconds behind the data. With the control channel,
the two of them dial a shard that does not answer once per second."""
SERVER_OPTIONS = [
    *_keepalive(10_000, 30_000),  # leases notice dead learners sooner
    *_SIZES,
    (
        "grpc.http2.min_ping_interval_without_data_ms",
        500,
    ),  # else idle channels are cut off for too many pings
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # or a second process takes the same port in silence
]

# ---------------------------------------------------------------- identity


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls: from metadata, before the first payload byte."""

    run_id: str
    learner_id: str = ""
    generation: int = 0
    """0: no lease (Join, and observers)."""
    epoch: int = 0

    def metadata(self, token: str | None) -> tuple[tuple[str, str], ...]:
        pairs = [("diloco-run", self.run_id)]
        if self.learner_id:
            pairs.append(("diloco-learner", self.learner_id))
        if self.generation:
            pairs += [("diloco-generation", str(self.generation)), ("diloco-epoch", str(self.epoch))]
        if token:
            pairs.append(("authorization", f"Bearer {token}"))
        return tuple(pairs)


_LEARNER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


def check_learner_id(learner_id: str) -> None:
    """Raises BadLearnerId."""
    if not _LEARNER_ID.match(learner_id):
        raise errors.BadLearnerId(f"learner id {learner_id[:64]!r} is not 1 to 64 of A-Z a-z 0-9 . _ -")


def identify(metadata: Iterable[tuple[str, str | bytes]], run_id: str, token: str | None) -> Identity:
    """The caller's identity. Raises Unauthenticated, WrongRun, BadLearnerId or BadRequest."""
    values = {key: value for key, value in metadata if isinstance(value, str)}
    if token is not None:
        _check_token(values.get("authorization"), token)
    run = values.get("diloco-run", "")
    if run != run_id:
        raise errors.WrongRun(f"this shard belongs to run {run_id!r}, the caller to {run[:64]!r}; check run.id")
    learner = values.get("diloco-learner", "")
    if learner:
        check_learner_id(learner)
    return Identity(run, learner, _decimal(values, "diloco-generation"), _decimal(values, "diloco-epoch"))


def _check_token(authorization: str | None, token: str) -> None:
    if authorization is None:
        raise errors.Unauthenticated("this shard asks for a token; set security.token_file")
    if not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise errors.Unauthenticated("the token is not this shard's; check security.token_file")


def _decimal(values: Mapping[str, str], key: str) -> int:
    text = values.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise errors.BadRequest(f"metadata {key} is {text[:32]!r}, not a number")
    return int(text)


# ---------------------------------------------------------------- errors

_STATUS: dict[type[errors.Refusal], grpc.StatusCode] = {
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.BadLearnerId: grpc.StatusCode.INVALID_ARGUMENT,
    errors.BadSize: grpc.StatusCode.INVALID_ARGUMENT,
    errors.BadEncoding: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownEncoding: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFinite: grpc.StatusCode.INVALID_ARGUMENT,
    errors.BadChecksum: grpc.StatusCode.DATA_LOSS,
    errors.TornUpload: grpc.StatusCode.UNAVAILABLE,
    errors.UnknownFragment: grpc.StatusCode.NOT_FOUND,
    errors.NotSeeded: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongRun: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ManifestMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotJoined: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseExpired: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Stalled: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleGeneration: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Superseded: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongRound: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TooStale: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ContributionConflict: grpc.StatusCode.ALREADY_EXISTS,
    errors.NormTooLarge: grpc.StatusCode.OUT_OF_RANGE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.Busy: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_BY_CODE = {refusal.code: refusal for refusal in _STATUS}


def status_of(refusal: errors.Refusal) -> grpc.StatusCode:
    return _STATUS.get(type(refusal), grpc.StatusCode.UNKNOWN)


def refusal_from(code: str, message: str) -> errors.Refusal:
    """The error that a stable code stands for."""
    kind = _BY_CODE.get(code, errors.Refusal)
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error


def refusal_of(error: grpc.aio.AioRpcError) -> errors.Refusal | None:
    """What a shard refused, or None if the call failed on its way."""
    for key, value in error.trailing_metadata() or ():
        if key == CODE_KEY:
            return refusal_from(str(value), error.details() or "")
    return None


async def refuse(context: grpc.aio.ServicerContext[Any, Any], refusal: errors.Refusal) -> NoReturn:
    """End a call with a refusal. Does not return."""
    await context.abort(status_of(refusal), str(refusal), ((CODE_KEY, refusal.code),))
    raise AssertionError("abort returned")


# ---------------------------------------------------------------- plain values <-> protobuf


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
        idle_s=progress.idle_s,
    )


def progress_from_pb(progress: pb.Progress) -> Progress:
    """Raises BadRequest for times that are no times: others' grace windows are made of them."""
    for name, seconds in (("step_time_s", progress.step_time_s), ("idle_s", progress.idle_s)):
        if not 0 <= seconds < float("inf"):
            raise errors.BadRequest(f"{name} is {seconds}, not a number of seconds")
    loss = progress.loss if progress.HasField("loss") else None
    return Progress(progress.inner_step, progress.tokens, loss, progress.step_time_s, progress.idle_s)


def pulse_to_pb(pulse: Pulse) -> pb.Pulse:
    return pb.Pulse(
        tokens_merged=pulse.tokens_merged,
        tokens_budget=pulse.tokens_budget,
        learners_alive=pulse.learners_alive,
    )


def pulse_from_pb(pulse: pb.Pulse) -> Pulse:
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
                    fragment_id=directive.fragment_id,
                    version=directive.version,
                    participants=directive.participants,
                    merged_version=directive.merged_version,
                    epoch=directive.epoch,
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
    """None for a kind that this version does not know."""
    match directive.WhichOneof("kind"):
        case "collect":
            return Collect(directive.collect.fragment_id, directive.collect.round, directive.collect.epoch)
        case "committed":
            c = directive.committed
            return Committed(c.fragment_id, c.version, c.participants, c.merged_version, c.epoch)
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
