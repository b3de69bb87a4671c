"""The doctor's calls to one shard. They only read, as an observer with the caller's credentials.

Join as an observer, Pull of one fragment until enough bytes arrived, and Probe.Measure: each within the shard's limits
and limits of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc

from diloco_common.errors import DilocoError
from diloco_common.ports import Unavailable
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.messages import (
    PROBE_BYTES_MAX,
    PROBE_MESSAGE_BYTES,
    PROBE_S,
    JoinAnswer,
    JoinRequest,
    PullRequest,
)
from diloco_deploy import ASK_S
from diloco_deploy.doctor.checks import MEASURE_S, Door, MeasuredShard
from diloco_protos import parameter_server_pb2 as pb

T = TypeVar("T")

DOWN_BYTES_MAX = 16 << 20
PACKAGE_CHARACTERS_MAX = 64
ENOUGH_BYTES = 64 << 10
"""Fewest bytes from which a bandwidth is computed."""


class NoShard(Exception):
    """Something other than a shard answers; the message has gRPC's words."""


class Silence(Exception):
    """The connection is open, but no answer comes."""


def describe(door: Door, protocol: int) -> JoinAnswer:
    """The shard's description of the run. Raises its Refusal, NoShard, Silence."""
    request = JoinRequest(protocol, "", observe=True)

    async def ask(channel: grpc.aio.Channel) -> JoinAnswer:
        join = channel.unary_unary(
            f"/{rpc.SERVICE}/Join", request_serializer=protobuf.serialize,
            response_deserializer=pb.JoinResponse.FromString,
        )  # fmt: skip
        return protobuf.join_answer_from_pb(
            await join(protobuf.to_pb(request), metadata=_metadata(door), timeout=ASK_S)
        )

    return _called(door, ask)


def measure(door: Door) -> MeasuredShard:
    """Measure upload rate, clock and package of a shard. Raises Refusal, NoShard (it has no Probe), Silence."""

    async def ask(channel: grpc.aio.Channel) -> MeasuredShard:
        probe = channel.stream_unary(
            f"/{rpc.PROBE}/Measure", request_serializer=protobuf.serialize,
            response_deserializer=pb.ProbeResponse.FromString,
        )  # fmt: skip
        answer = await probe(_zeros(), metadata=_metadata(door), timeout=ASK_S + PROBE_S)
        came = time.time()
        enough = answer.num_bytes >= ENOUGH_BYTES and answer.seconds > 0
        up = 8 * answer.num_bytes / answer.seconds if enough else None
        return MeasuredShard(up, answer.clock - came, answer.package[:PACKAGE_CHARACTERS_MAX])

    return _called(door, ask)


def pull_rate(door: Door, fragment_id: int) -> float | None:
    """Download rate in bits per second; None: the fragment is too small to tell. Raises Refusal, NoShard, Silence."""
    request = protobuf.to_pb(PullRequest(fragment_id))

    async def ask(channel: grpc.aio.Channel) -> float | None:
        pull = channel.unary_stream(f"/{rpc.SERVICE}/Pull", request_serializer=protobuf.serialize)
        call = pull(request, metadata=_metadata(door), timeout=ASK_S + MEASURE_S)
        num_bytes, began, last = -1, 0.0, 0.0
        try:
            async with asyncio.timeout(ASK_S + MEASURE_S):
                while (part := await call.read()) is not rpc.EOF:
                    last = time.monotonic()
                    if num_bytes < 0:  # the header: the clock starts
                        num_bytes, began = 0, last
                        continue
                    num_bytes += len(part)
                    if num_bytes >= DOWN_BYTES_MAX or last - began > MEASURE_S:
                        break
        except TimeoutError:
            pass
        finally:
            call.cancel()
        return 8 * num_bytes / (last - began) if num_bytes >= ENOUGH_BYTES and last > began else None

    return _called(door, ask)


async def _zeros() -> AsyncIterator[pb.ProbeRequest]:
    message = pb.ProbeRequest(zeros=bytes(PROBE_MESSAGE_BYTES - 16))
    for _ in range(PROBE_BYTES_MAX // PROBE_MESSAGE_BYTES + 1):
        yield message


def _metadata(door: Door) -> tuple[tuple[str, str], ...]:
    return rpc.metadata_of(Identity(door.run_id), door.token)


def _called(door: Door, ask: Callable[[grpc.aio.Channel], Awaitable[T]]) -> T:
    async def call() -> T:
        channel = rpc.channel(door.address, door.files, rpc.BULK_CHANNEL_OPTIONS)
        try:
            return await ask(channel)
        except grpc.aio.AioRpcError as error:
            raise _cause(error) from None
        finally:
            await channel.close(0.0)

    return asyncio.run(call())


def _cause(error: grpc.aio.AioRpcError) -> Exception:
    if (refusal := rpc.refusal_of(error)) is not None:
        return refusal
    words = f"{error.code().name.lower()}: {(error.details() or '')[:200]}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or "timed out before receiving SETTINGS" in words:
        return Silence(words)
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL):
        return NoShard(words)
    found: DilocoError = Unavailable(words)
    return found
