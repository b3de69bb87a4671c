"""The calls to one shard over gRPC: an adapter of `Transport` (diloco_common/ports.py).

Control, pushes and pulls have separate channels, so that bulk data never delays a heartbeat. Channels are made on first
use, inside the event loop that uses them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from diloco_common.codec import Chunk, Payload
from diloco_common.errors import DilocoError, HandshakeFailed
from diloco_common.ports import Unavailable
from diloco_common.trust.credentials import Credentials, Whereabouts
from diloco_common.trust.files import TlsFiles
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.calls import DIAL_S, LONG_S
from diloco_common.wire.handshake import find_cause
from diloco_common.wire.messages import (
    Directive,
    FollowRequest,
    JoinAnswer,
    JoinRequest,
    Progress,
    PullHeader,
    PullRequest,
    PushAnswer,
    PushHeader,
)
from diloco_protos import parameter_server_pb2 as pb


class GrpcTransport:
    """The calls of one learner or observer to one shard."""

    def __init__(self, address: str, credentials: Credentials | None = None, *, waits_for_shard: bool = False) -> None:
        """`address`: host:port or `@FILE` (credentials.py). `credentials`: if None, send none, and do not encrypt.
        `waits_for_shard`: Join waits until an absent shard is there."""
        self._credentials = credentials or Credentials()
        where = Whereabouts(address)
        self._waits_for_shard = waits_for_shard
        self._control = _RenewedChannel(where, rpc.CHANNEL_OPTIONS, self._credentials)
        self._pushes = _RenewedChannel(where, rpc.BULK_CHANNEL_OPTIONS, self._credentials)
        self._pulls = _RenewedChannel(where, rpc.BULK_CHANNEL_OPTIONS, self._credentials)
        self._probe = _Probe(where, self._credentials)

    async def join(self, caller: Identity, request: JoinRequest, timeout_s: float) -> JoinAnswer:
        message = protobuf.to_pb(request)
        wait = True if self._waits_for_shard else None
        try:
            call = self._control.dialed("Join", "unary_unary")
            answer = await call(message, metadata=self._metadata(caller), timeout=timeout_s, wait_for_ready=wait)
        except grpc.aio.AioRpcError as error:
            raise await self._probe.explained(error) from None
        return protobuf.join_answer_from_pb(protobuf.parse(pb.JoinResponse, answer))

    def attend(self, caller: Identity) -> GrpcControlStream:
        attend = self._control.dialed("Attend", "stream_stream")
        return GrpcControlStream(attend(metadata=self._metadata(caller)), self._probe)

    def follow(self, caller: Identity, request: FollowRequest) -> GrpcControlStream:
        follow = self._control.dialed("Follow", "unary_stream")
        message = protobuf.to_pb(request)
        return GrpcControlStream(follow(message, metadata=self._metadata(caller)), self._probe)

    async def push(self, caller: Identity, header: PushHeader, payload: Payload, timeout_s: float) -> PushAnswer:
        messages = protobuf.push_requests(header, payload)
        try:
            call = self._pushes.dialed("Push", "stream_unary", serializer=None)  # already bytes
            answer = await call(messages, metadata=self._metadata(caller), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from None
        return protobuf.answer_from_pb(protobuf.parse(pb.PushResponse, answer))

    async def pull(
        self, caller: Identity, request: PullRequest, timeout_s: float
    ) -> AsyncGenerator[PullHeader | Chunk, None]:
        message = protobuf.to_pb(request)
        pull = self._pulls.dialed("Pull", "unary_stream")
        call = pull(message, metadata=self._metadata(caller), timeout=timeout_s)
        try:
            while True:
                part = await call.read()
                if part is rpc.EOF:
                    return
                yield protobuf.pull_part(part)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from None
        finally:
            call.cancel()

    async def leave(self, caller: Identity, timeout_s: float) -> None:
        leave = self._control.dialed("Leave", "unary_unary", on_newest=False)
        try:
            await leave(pb.LeaveRequest(), metadata=self._metadata(caller), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from None

    async def close(self, grace_s: float) -> None:
        for line in (self._control, self._pushes, self._pulls):
            await line.close(grace_s)

    def _metadata(self, caller: Identity) -> tuple[tuple[str, str], ...]:
        return rpc.metadata_of(caller, self._credentials.token())


class _RenewedChannel:
    """One channel, replaced when the certificate or the address changes: gRPC fixes both when it makes a channel."""

    def __init__(self, where: Whereabouts, options: list[tuple[str, int]], credentials: Credentials) -> None:
        self._where, self._options, self._credentials = where, options, credentials
        self._address = ""
        self._files: TlsFiles | None = None
        self._channel: grpc.aio.Channel | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    def dialed(
        self, name: str, kind: str, *, serializer: Callable[..., bytes] | None = protobuf.serialize,
        on_newest: bool = True,
    ) -> Callable[..., Any]:  # fmt: skip
        """A function that makes a call; `kind` is grpc's. Calls in progress on an older channel may finish there.

        It returns raw bytes: gRPC itself would silently turn an invalid message into None. Raises Unavailable.
        """
        if self._channel is None or on_newest:
            self._renew()
        make: Callable[..., Callable[..., Any]] = getattr(self._channel, kind)
        return make(f"/{rpc.SERVICE}/{name}", request_serializer=serializer)

    def _renew(self) -> None:
        files, address = self._credentials.tls(), self._where.now()
        if self._channel is None or files is not self._files or address != self._address:
            if self._channel is not None:
                # Calls on a channel with an old certificate have two minutes to finish.
                retiring = asyncio.create_task(self._channel.close(120.0), name="retire channel")
                self._retiring.add(retiring)
                retiring.add_done_callback(self._retiring.discard)
            self._files, self._address = files, address
            self._channel = rpc.channel(address, files, self._options)

    async def close(self, grace_s: float) -> None:
        for retiring in self._retiring:
            retiring.cancel()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace_s)


class _Probe:
    """Finds out why connecting fails: at the first failure, and then less and less often."""

    def __init__(self, where: Whereabouts, credentials: Credentials) -> None:
        self._where, self._credentials = where, credentials
        self._found: HandshakeFailed | None = None
        self._next_at = 0.0
        self._wait_s = DIAL_S

    async def explained(self, error: grpc.aio.AioRpcError) -> DilocoError:
        """The shard's Refusal; or the cause, if connecting failed and it is known; else Unavailable."""
        if (refusal := rpc.refusal_of(error)) is not None:
            self._wait_s, self._next_at, self._found = DIAL_S, 0.0, None
            return refusal
        unavailable = _unavailable(error)
        if not rpc.failed_to_connect(error):
            return unavailable
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_at:
            self._next_at = loop.time() + self._wait_s
            self._wait_s = min(2 * self._wait_s, LONG_S)
            self._found = await loop.run_in_executor(None, find_cause, self._where.now(), self._credentials.tls())
        return self._found or unavailable


class GrpcControlStream:
    def __init__(self, call: Any, probe: _Probe) -> None:
        self._call = call
        self._probe = probe

    async def report(self, progress: Progress) -> None:
        try:
            await self._call.write(protobuf.progress_to_pb(progress))
        except grpc.aio.AioRpcError as error:
            raise _unavailable(error) from None
        except asyncio.InvalidStateError:
            raise Unavailable("the stream has ended") from None

    async def hear(self) -> Directive | None:
        try:
            while True:
                data = await self._call.read()
                if data is rpc.EOF:
                    return None
                directive = protobuf.directive_from_pb(protobuf.parse(pb.Directive, data))
                if directive is not None:
                    return directive
        except grpc.aio.AioRpcError as error:
            raise await self._probe.explained(error) from None

    def cancel(self) -> None:
        self._call.cancel()


def _error_of(error: grpc.aio.AioRpcError) -> DilocoError:
    return rpc.refusal_of(error) or _unavailable(error)


def _unavailable(error: grpc.aio.AioRpcError) -> Unavailable:
    is_refused = "Connection refused" in (error.details() or "")
    return Unavailable(f"{error.code().name.lower()}: {error.details()}", is_refused=is_refused)
