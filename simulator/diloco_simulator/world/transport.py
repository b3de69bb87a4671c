"""`diloco_common.ports.Transport` over the simulated network: the calls of the wire, without gRPC. For untrusted
callers, it also checks their identity and passes their messages through protobuf.

Honest processes pass values directly, which is faster. A shard's messages can be encoded here to check that they fit
the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from diloco_common.codec import Chunk, Payload
from diloco_common.errors import BadRequest, NotSeeded, Refusal, WrongIdentity
from diloco_common.ports import ShardService, Unavailable
from diloco_common.trust.identity import Identity, check_learner_id
from diloco_common.wire import protobuf
from diloco_common.wire.bounds import MESSAGE_BYTES_MAX
from diloco_common.wire.messages import (
    Collect,
    Committed,
    Directive,
    Drain,
    Evicted,
    FollowRequest,
    JoinAnswer,
    JoinRequest,
    Progress,
    PullHeader,
    PullRequest,
    Pulse,
    PushAnswer,
    PushHeader,
    Stop,
)
from diloco_simulator.lies import Sniffed
from diloco_simulator.world.network import Answer, End, Network, NetworkCall, Path
from diloco_simulator.world.process import SimulatedProcess

T = TypeVar("T")
Pushing = Callable[[PushHeader, Payload], None]
Answered = Callable[[PushHeader, str], None]
Leaving = Callable[[PushHeader, Payload], tuple[PushHeader, Payload]]


class MemoryTransport:
    """The transport from one learner's process to one shard."""

    def __init__(
        self,
        network: Network,
        process: SimulatedProcess,
        path: Path,
        pushing: Pushing,
        answered: Answered,
        keepalive_s: float,
        leaving: Leaving = lambda header, payload: (header, payload),
    ) -> None:
        """`pushing` is called with every push, `answered` with the answer: the code of a refusal, or "". `leaving`
        turns a push into what really leaves the process.

        A call breaks if there is no answer for `keepalive_s` seconds.
        """
        self._network = network
        self._process = process
        self._path = path
        self._pushing = pushing
        self._answered = answered
        self._keepalive_s = keepalive_s
        self._leaving = leaving

    async def join(self, caller: Identity, request: JoinRequest, timeout_s: float) -> JoinAnswer:
        return await self._ask(lambda service, _: service.join(caller, request), timeout_s)

    def attend(self, caller: Identity) -> MemoryStream:
        return MemoryStream(self._open(lambda service, reports: service.attend(caller, reports), is_short=False))

    def follow(self, caller: Identity, request: FollowRequest) -> MemoryStream:
        return MemoryStream(self._open(lambda service, _: service.follow(caller, request), is_short=False))

    async def push(self, caller: Identity, header: PushHeader, payload: Payload, timeout_s: float) -> PushAnswer:
        self._pushing(header, payload)
        header, payload = self._leaving(header, payload)
        self._network.sniffed.append(Sniffed(self._path[1], caller, header, payload))
        try:
            answered = await self._ask(
                lambda service, parts: service.push(caller, parts), timeout_s, header, *payload.chunks
            )
        except Refusal as refusal:
            self._answered(header, refusal.code)
            raise
        self._answered(header, "")
        return answered

    async def pull(
        self, caller: Identity, request: PullRequest, timeout_s: float
    ) -> AsyncGenerator[PullHeader | Chunk, None]:
        call = self._open(lambda service, _: service.pull(caller, request), is_short=True)
        deadline = self._deadline(timeout_s)
        try:
            call.send(End)
            while (item := await _receive(call, deadline)) is not End:
                yield item
        finally:
            call.cancel()

    async def leave(self, caller: Identity, timeout_s: float) -> None:
        await self._ask(lambda service, _: service.leave(caller), timeout_s)

    async def close(self, grace_s: float) -> None:
        """Do nothing: calls end with their callers."""

    async def _ask(self, act: Callable[[ShardService, Any], Awaitable[T]], timeout_s: float, *parts: Any) -> T:
        call = self._open(_once(act), is_short=True)
        deadline = self._deadline(timeout_s)
        try:
            call.send(*parts, End)
            return await _receive(call, deadline)  # type: ignore[no-any-return]
        finally:
            call.cancel()

    def _deadline(self, timeout_s: float) -> float:
        return float(self._process.loop.time()) + min(timeout_s, self._keepalive_s)

    def _open(self, answer: Answer, *, is_short: bool) -> NetworkCall:
        return self._network.open(self._process, self._path, answer, is_short=is_short)


class UntrustedTransport(MemoryTransport):
    """A transport for an untrusted caller, who may also leave calls open."""

    def __init__(
        self, network: Network, process: SimulatedProcess, path: Path, proven: str | None,
        has_model: Callable[[int], bool], keepalive_s: float,
    ) -> None:  # fmt: skip
        """`proven`: see `WireDoor`. `has_model`: whether the shard with this index has a model that stays."""
        super().__init__(network, process, path, lambda header, payload: None, lambda header, code: None, keepalive_s)
        self._proven = proven
        self._has_model = has_model

    def hold_push(self, caller: Identity, *parts: PushHeader | Chunk) -> NetworkCall:
        call = self._open(_once(lambda service, parts: service.push(caller, parts)), is_short=True)
        call.send(*parts)
        return call

    def hold_pull(self, caller: Identity, request: PullRequest) -> NetworkCall:
        return self._open(lambda service, _: service.pull(caller, request), is_short=True)

    def hold_stream(self, caller: Identity) -> NetworkCall:
        return self._open(lambda service, reports: service.attend(caller, reports), is_short=False)

    def _open(self, answer: Answer, *, is_short: bool) -> NetworkCall:
        def behind_the_door(service: ShardService, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
            return answer(WireDoor(service, self._proven, lambda: self._has_model(self._path[1])), items)

        return super()._open(behind_the_door, is_short=is_short)


class MemoryStream:
    def __init__(self, call: NetworkCall) -> None:
        self._call = call

    async def report(self, progress: Progress) -> None:
        self._call.send(progress)

    async def hear(self) -> Directive | None:
        item = await self._call.receive()
        return None if item is End else item

    def cancel(self) -> None:
        self._call.cancel()


def _once(act: Callable[[ShardService, Any], Awaitable[Any]]) -> Answer:
    async def answer(service: ShardService, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        yield await act(service, items)

    return answer


async def _receive(call: NetworkCall, deadline: float) -> Any:
    try:
        async with asyncio.timeout_at(deadline):
            return await call.receive()
    except TimeoutError:
        raise Unavailable("no answer came in time") from None


class WireDoor:
    """A shard's service for one untrusted caller: a `ports.ShardService`."""

    def __init__(self, service: ShardService, proven: str | None, has_model: Callable[[], bool]) -> None:
        """`proven`: the learner id that this caller has proven, and the only one it can use. None: it can use any id.

        `has_model`: whether the shard has a model that can no longer be replaced. A trusted learner seeds the first.
        """
        self._service = service
        self._proven = proven
        self._has_model = has_model

    async def read(self, caller: Identity, message: Callable[[], Awaitable[T]]) -> T:
        return await self._service.read(caller, message)

    async def join(self, caller: Identity, request: JoinRequest) -> JoinAnswer:
        self._identify(caller)
        if not self._has_model() and not request.observe:
            raise NotSeeded("the first model comes from somebody else")
        return await self._service.join(caller, protobuf.join_request_from_pb(protobuf.to_pb(request)))

    def attend(self, caller: Identity, reports: AsyncIterator[Progress]) -> AsyncGenerator[Directive, None]:
        self._identify(caller)
        return self._service.attend(caller, _reports(reports))

    def follow(self, caller: Identity, request: FollowRequest) -> AsyncGenerator[Directive, None]:
        return self._service.follow(caller, protobuf.follow_request_from_pb(protobuf.to_pb(request)))

    async def push(self, caller: Identity, parts: AsyncIterator[PushHeader | Chunk]) -> PushAnswer:
        self._identify(caller)
        return await self._service.push(caller, _parts(parts))

    def pull(
        self, caller: Identity, request: PullRequest, ends_in_s: float = 0.0
    ) -> AsyncGenerator[PullHeader | Chunk, None]:
        self._identify(caller)
        read = protobuf.pull_request_from_pb(protobuf.to_pb(request))
        return self._service.pull(caller, read, ends_in_s)

    async def leave(self, caller: Identity) -> None:
        self._identify(caller)
        await self._service.leave(caller)

    def _identify(self, caller: Identity) -> None:
        check_learner_id(caller.learner_id)
        if self._proven is not None and caller.learner_id != self._proven:
            raise WrongIdentity(f"{self._proven} cannot speak as {caller.learner_id}")


async def _reports(reports: AsyncIterator[Progress]) -> AsyncIterator[Progress]:
    async for report in reports:
        yield protobuf.progress_from_pb(protobuf.progress_to_pb(report))


async def _parts(parts: AsyncIterator[PushHeader | Chunk]) -> AsyncIterator[PushHeader | Chunk]:
    async for part in parts:
        if isinstance(part, PushHeader):
            yield protobuf.from_pb(PushHeader, protobuf.to_pb(part))
        elif len(part) <= MESSAGE_BYTES_MAX["PushRequest"]:
            yield part
        else:
            raise BadRequest("the message is too large")


def encoded(item: Any) -> Any:
    """A shard's message as protobuf; other items are returned unchanged. Raises ValueError."""
    match item:
        case JoinAnswer() | PullHeader() | PushAnswer():
            return protobuf.to_pb(item)
        case Collect() | Committed() | Pulse() | Drain() | Stop() | Evicted():
            return protobuf.directive_to_pb(item)
    return item
