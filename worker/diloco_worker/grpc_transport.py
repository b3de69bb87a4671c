"""The way to one shard over gRPC: an adapter of `Transport` (diloco_common/ports.py).

Control, pushes and pulls have a channel each, so that bulk never starves a heartbeat. The channels are made on first
use, inside the event loop that uses them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import cached_property
from typing import Any

import grpc

from diloco_common import protobuf, rpc
from diloco_common.codec import Payload
from diloco_common.errors import DilocoError
from diloco_common.identity import Identity
from diloco_common.messages import (
    Directive,
    JoinAnswer,
    JoinRequest,
    Progress,
    PullHeader,
    PullRequest,
    PushAnswer,
    PushHeader,
)
from diloco_common.ports import Unavailable
from diloco_protos import parameter_server_pb2 as pb
from diloco_protos import parameter_server_pb2_grpc as pb_grpc


class GrpcTransport:
    """The calls of one learner, or of one observer, to one shard."""

    def __init__(self, address: str, bearer_token: str | None = None, *, waits_for_shard: bool = False) -> None:
        """`bearer_token`: if the shard asks for one. `waits_for_shard`: Join waits for an absent shard."""
        self._address = address
        self._bearer_token = bearer_token
        self._waits_for_shard = waits_for_shard
        self._channels: list[grpc.aio.Channel] = []

    async def join(self, caller: Identity, request: JoinRequest, timeout_s: float) -> JoinAnswer:
        message = protobuf.join_request_to_pb(request)
        wait = True if self._waits_for_shard else None
        try:
            answer = await self._control.Join(
                message, metadata=self._metadata(caller), timeout=timeout_s, wait_for_ready=wait
            )
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from None
        return protobuf.join_answer_from_pb(answer)

    def attend(self, caller: Identity) -> GrpcControlStream:
        return GrpcControlStream(self._control.Attend(metadata=self._metadata(caller)))

    async def push(self, caller: Identity, header: PushHeader, payload: Payload, timeout_s: float) -> PushAnswer:
        messages = protobuf.push_requests(header, payload)
        try:
            answer = await self._pushes.Push(messages, metadata=self._metadata(caller), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from None
        return protobuf.answer_from_pb(answer)

    async def pull(
        self, caller: Identity, request: PullRequest, timeout_s: float
    ) -> AsyncGenerator[PullHeader | bytes, None]:
        message = protobuf.pull_request_to_pb(request)
        call = self._pulls.Pull(message, metadata=self._metadata(caller), timeout=timeout_s)
        try:
            while (part := await call.read()) is not rpc.EOF:
                yield protobuf.pull_header_from_pb(part.header) if part.HasField("header") else part.chunk
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from None
        finally:
            call.cancel()

    async def leave(self, caller: Identity, timeout_s: float) -> None:
        try:
            await self._control.Leave(pb.LeaveRequest(), metadata=self._metadata(caller), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from None

    async def close(self, grace_s: float) -> None:
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close(grace_s)

    @cached_property
    def _control(self) -> pb_grpc.ParameterServerStub:
        return self._open(rpc.CHANNEL_OPTIONS)

    @cached_property
    def _pushes(self) -> pb_grpc.ParameterServerStub:
        return self._open(rpc.BULK_CHANNEL_OPTIONS)

    @cached_property
    def _pulls(self) -> pb_grpc.ParameterServerStub:
        return self._open(rpc.BULK_CHANNEL_OPTIONS)

    def _open(self, options: list[tuple[str, int]]) -> pb_grpc.ParameterServerStub:
        channel = grpc.aio.insecure_channel(self._address, options=options)
        self._channels.append(channel)
        return pb_grpc.ParameterServerStub(channel)  # type: ignore[no-untyped-call]

    def _metadata(self, caller: Identity) -> tuple[tuple[str, str], ...]:
        return rpc.metadata_of(caller, self._bearer_token)


class GrpcControlStream:
    """The control stream of one Attend call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def report(self, progress: Progress) -> None:
        try:
            await self._call.write(protobuf.progress_to_pb(progress))
        except grpc.aio.AioRpcError as error:
            raise _unavailable(error) from None
        except asyncio.InvalidStateError:
            raise Unavailable("the stream has ended") from None

    async def hear(self) -> Directive | None:
        try:
            while (message := await self._call.read()) is not rpc.EOF:
                if (directive := protobuf.directive_from_pb(message)) is not None:
                    return directive
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from None
        return None

    def cancel(self) -> None:
        self._call.cancel()


def _error_of(error: grpc.aio.AioRpcError) -> DilocoError:
    """The Refusal that the shard answered; else Unavailable."""
    return rpc.refusal_of(error) or _unavailable(error)


def _unavailable(error: grpc.aio.AioRpcError) -> Unavailable:
    return Unavailable(f"{error.code().name.lower()}: {error.details()}")
