"""The conventions of diloco.v1 on gRPC: channel options, limits, identity and error codes.

The only file of `common` that knows grpc. `protobuf.py` makes the messages.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import grpc

from diloco_common import errors
from diloco_common.codec import encoding_names
from diloco_common.errors import refusal_from
from diloco_common.identity import Identity, check_learner_id

MAX_MESSAGE_BYTES = 20 << 20
"""More than the largest chunk (4 Mi float32 elements) and the largest model description."""
CODE_KEY = "diloco-code"
EOF = grpc.aio.EOF
"""Reading a stream returns this at its end."""
DECODES = encoding_names()
"""Encodings that this build decodes."""


def _keepalive(every_ms: int, timeout_ms: int) -> list[tuple[str, int]]:
    """Without `ping_timeout_ms`, gRPC notices a frozen peer only after a minute, whatever the other two say."""
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
"""For a control channel. It notices a frozen shard after about 3 s."""
BULK_CHANNEL_OPTIONS = [*_CHANNEL, ("grpc.max_reconnect_backoff_ms", 4_000), *_keepalive(10_000, 30_000)]
"""For a channel for pushes or pulls. On a thin link, a ping waits for seconds behind the data. The two of them and the
control channel together dial an unreachable shard about once per second."""
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


def metadata_of(identity: Identity, bearer_token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of a call. It tells the shard who calls, before the first payload byte."""
    pairs = [("diloco-run", identity.run_id)]
    if identity.learner_id:
        pairs.append(("diloco-learner", identity.learner_id))
    if identity.generation:
        pairs += [("diloco-generation", str(identity.generation)), ("diloco-epoch", str(identity.epoch))]
    if bearer_token:
        pairs.append(("authorization", f"Bearer {bearer_token}"))
    return tuple(pairs)


def identify(metadata: Iterable[tuple[str, str | bytes]], run_id: str, bearer_token: str | None) -> Identity:
    """The caller's identity. Raises Unauthenticated, WrongRun, BadLearnerId or BadRequest."""
    values = {key: value for key, value in metadata if isinstance(value, str)}
    if bearer_token is not None:
        _check_bearer_token(values.get("authorization"), bearer_token)
    run = values.get("diloco-run", "")
    if run != run_id:
        raise errors.WrongRun(f"this shard belongs to run {run_id!r}, the caller to {run[:64]!r}; check run.id")
    learner = values.get("diloco-learner", "")
    if learner:
        check_learner_id(learner)
    return Identity(run, learner, _decimal(values, "diloco-generation"), _decimal(values, "diloco-epoch"))


def _check_bearer_token(authorization: str | None, bearer_token: str) -> None:
    if authorization is None:
        raise errors.Unauthenticated("this shard asks for a bearer token; set security.token_file")
    if not hmac.compare_digest(authorization.encode(), f"Bearer {bearer_token}".encode()):
        raise errors.Unauthenticated("the bearer token is not the one of this shard; check security.token_file")


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


def status_of(refusal: errors.Refusal) -> grpc.StatusCode:
    return _STATUS.get(type(refusal), grpc.StatusCode.UNKNOWN)


def refusal_of(error: grpc.aio.AioRpcError) -> errors.Refusal | None:
    """The shard's refusal, or None if the call failed on its way."""
    for key, value in error.trailing_metadata() or ():
        if key == CODE_KEY:
            return refusal_from(str(value), error.details() or "")
    return None


async def refuse(context: grpc.aio.ServicerContext[Any, Any], refusal: errors.Refusal) -> NoReturn:
    """End a call with a refusal. Does not return."""
    await context.abort(status_of(refusal), str(refusal), ((CODE_KEY, refusal.code),))
    raise AssertionError("abort returned")
