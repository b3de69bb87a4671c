"""The conventions of diloco.v1 on gRPC: channel options, limits, identity and error codes.

Only this file and grpc_transport.py know grpc in `common`. `protobuf.py` makes the messages.
"""

from __future__ import annotations

import hmac
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeAlias

import grpc

from diloco_common import errors
from diloco_common.codec import encoding_names
from diloco_common.errors import refusal_from
from diloco_common.trust.files import TlsFiles
from diloco_common.trust.identity import Identity, check_learner_id
from diloco_common.wire.addresses import is_loopback, parse_address
from diloco_common.wire.bounds import MESSAGE_BYTES_MAX, NAME_MAX, PARTS_MAX

MAX_MESSAGE_BYTES = 2 * max(MESSAGE_BYTES_MAX.values())
"""gRPC's limit. A message between our limit and this one gets a refusal that explains; gRPC just ends the call."""
Metadata: TypeAlias = tuple[tuple[str, str], ...]
CODE_KEY = "diloco-code"
SERVICE = "diloco.v1.ParameterServer"
CLOCK_KEY, PACKAGE_KEY = "diloco-clock", "diloco-package"
EOF = grpc.aio.EOF
"""Returned by reading a stream at its end."""
DECODES = encoding_names()


def _keepalive(every_ms: int, timeout_ms: int) -> list[tuple[str, int]]:
    """Without `ping_timeout_ms`, gRPC notices a frozen peer only after a minute, despite the other two options."""
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
    ("grpc.use_local_subchannel_pool", 1),  # otherwise channels to one address share a connection
    ("grpc.enable_retries", 0),
]
CHANNEL_OPTIONS = [*_CHANNEL, ("grpc.max_reconnect_backoff_ms", 2_000), *_keepalive(2_000, 3_000)]
"""For a control channel: notices a frozen shard after about 3 s."""
BULK_CHANNEL_OPTIONS = [*_CHANNEL, ("grpc.max_reconnect_backoff_ms", 4_000), *_keepalive(10_000, 30_000)]
"""For a channel for pushes or pulls: on a thin link, a ping waits for seconds behind the data. Together with the
control channel, the two dial an unreachable shard about once per second."""
SERVER_OPTIONS = [
    *_keepalive(10_000, 30_000),  # leases notice dead learners sooner
    *_SIZES,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),  # otherwise idle channels are cut off for too many pings
    ("grpc.http2.max_ping_strikes", 0),
    # Bytes that a call may send before the shard reads them. By default, gRPC raises this to 4 MiB on fast links.
    ("grpc.http2.lookahead_bytes", 64 << 10),
    ("grpc.http2.bdp_probe", 0),
    # A connection takes one of the shard's places from its first byte, and gRPC cannot limit the connections of one
    # host. Three seconds are many round trips on any link that a learner can train over.
    ("grpc.server_handshake_timeout_ms", 3_000),
    ("grpc.max_concurrent_streams", 128),  # per connection; a proxy may carry many learners on one
    # Calls that wait for the event loop. Each may hold 64 KiB of a message: 200 MB in all. Above the first number, gRPC
    # silently cancels some at random; its default of 1000 is reached when 256 learners push and pull at once. Above the
    # second it cancels all.
    ("grpc.server.max_pending_requests", 3_000),
    ("grpc.server.max_pending_requests_hard_limit", 3_000),
    ("grpc.max_connection_idle_ms", 300_000),  # without any call
    ("grpc.so_reuseport", 0),  # otherwise a second process silently takes the same port
]

# ---------------------------------------------------------------- identity


def metadata_of(identity: Identity, bearer_token: str | None) -> Metadata:
    """The metadata of a call. It tells the shard who calls, before the first payload byte."""
    pairs = [("diloco-run", identity.run_id)]
    if identity.learner_id:
        pairs.append(("diloco-learner", identity.learner_id))
    if identity.generation:
        pairs += [("diloco-generation", str(identity.generation)), ("diloco-epoch", str(identity.epoch))]
    if identity.rank:
        pairs.append(("diloco-part", str(identity.rank)))
    if bearer_token:
        pairs.append(("authorization", f"Bearer {bearer_token}"))
    return tuple(pairs)


def host_of(peer: str) -> str:
    """The caller's address without its port, from gRPC's peer, such as ipv4:10.0.0.7:40000."""
    return peer.rpartition(":")[0]


def identify(
    metadata: Iterable[tuple[str, str | bytes]], run_id: str, bearer_token: str | None, peer: str = ""
) -> Identity:
    """The caller's identity; `peer` is its address. Raises Unauthenticated, WrongRun or BadRequest."""
    values = {key: value for key, value in metadata if isinstance(value, str)}
    if bearer_token is not None:
        _check_bearer_token(values.get("authorization"), bearer_token)
    run = values.get("diloco-run", "")
    if run != run_id:
        raise errors.WrongRun(
            f"this shard belongs to run {run_id!r}, the caller to {run[:64]!r}; "
            "check run.id (run= of join, --run of diloco pull and doctor)"
        )
    learner = values.get("diloco-learner", "")
    if learner:
        check_learner_id(learner)
    return Identity(
        run, learner, _decimal(values, "diloco-generation"), _decimal(values, "diloco-epoch"), peer,
        rank=min(_decimal(values, "diloco-part"), PARTS_MAX),
    )  # fmt: skip


def _check_bearer_token(authorization: str | None, bearer_token: str) -> None:
    if authorization is None:
        raise errors.Unauthenticated("this shard asks for a bearer token; set security.token_file (token= of join)")
    if not hmac.compare_digest(authorization.encode(), f"Bearer {bearer_token}".encode()):
        raise errors.Unauthenticated(
            "the bearer token is not the one of this shard; check security.token_file (token= of join)"
        )


def certificate_of(context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
    """A caller's certificate in PEM, with its chain checked by TLS; None without TLS."""
    return next(iter(context.auth_context().get("x509_pem_cert", ())), None)


def _decimal(values: Mapping[str, str], key: str) -> int:
    text = values.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise errors.BadRequest(f"metadata {key} is {text[:32]!r}, not a number")
    return int(text)


# ---------------------------------------------------------------- what a shard says about itself


class Hello(NamedTuple):
    clock: float
    """The shard's wall clock, seconds since 1970."""
    package: str
    """Version of its package."""


def hello(clock: float, package: str) -> Metadata:
    """The metadata with which the answer to a Join begins, for `diloco doctor`."""
    return (CLOCK_KEY, f"{clock:.3f}"), (PACKAGE_KEY, package)


def hello_of(metadata: Iterable[tuple[str, str | bytes]]) -> Hello | None:
    """None: the shard does not say its clock, or says something that is not a number."""
    values = {key: value for key, value in metadata if isinstance(value, str)}
    try:
        clock = float(values[CLOCK_KEY])
    except (KeyError, ValueError):
        return None
    return Hello(clock, values.get(PACKAGE_KEY, "")[:NAME_MAX]) if math.isfinite(clock) else None


# ---------------------------------------------------------------- TLS


def channel(address: str, files: TlsFiles | None, options: list[tuple[str, int]]) -> grpc.aio.Channel:
    """A channel to one shard, for a caller that trusts the ca.pem of these files and shows their certificate, if any.

    Without files it is plaintext. A proxy from the environment (`http_proxy`) is used for other machines only.
    """
    if is_loopback(parse_address(address).host):
        options = [*options, ("grpc.enable_http_proxy", 0)]
    if files is None:
        return grpc.aio.insecure_channel(address, options=options)
    key, chain = files.pair or (None, None)
    credentials = grpc.ssl_channel_credentials(files.ca, key, chain)
    return grpc.aio.secure_channel(address, credentials, options=options)


class ServerCredentials:
    """Credentials of a server that requires every caller's certificate. Its own can be replaced while it runs."""

    def __init__(self, files: TlsFiles) -> None:
        self._next: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)
        self.grpc = grpc.dynamic_ssl_server_credentials(
            _configuration(files), self._fetch, require_client_authentication=True
        )

    def exchange(self, files: TlsFiles) -> None:
        """Use these from the next handshake on. Existing connections continue."""
        self._next.append(_configuration(files))

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC's threads before every handshake; None: nothing new."""
        try:
            return self._next.pop()  # atomic: a concurrent exchange is not lost
        except IndexError:
            return None


def _configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    assert files.pair is not None, "a server has a certificate"
    return grpc.ssl_server_certificate_configuration([files.pair], files.ca)


# ---------------------------------------------------------------- errors


def status_of(refusal: errors.Refusal) -> grpc.StatusCode:
    return grpc.StatusCode[refusal.status]


def refusal_of(error: grpc.aio.AioRpcError) -> errors.Refusal | None:
    """The shard's refusal; None if the call failed on its way."""
    for key, value in error.trailing_metadata() or ():
        if key == CODE_KEY:
            return refusal_from(str(value), error.details() or "")
    return None


def failed_to_connect(error: grpc.aio.AioRpcError) -> bool:
    """Whether connecting failed although something may listen, perhaps because of a failed handshake."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return True  # a call that waits for its shard ends like this
    details = error.details() or ""
    return (
        error.code() is grpc.StatusCode.UNAVAILABLE
        and details.startswith("failed to connect")
        and "Connection refused" not in details
    )


async def refuse(context: grpc.aio.ServicerContext[Any, Any], refusal: errors.Refusal) -> NoReturn:
    """End a call with a refusal. Does not return."""
    await context.abort(status_of(refusal), str(refusal), ((CODE_KEY, refusal.code),))
    raise AssertionError("abort returned")
