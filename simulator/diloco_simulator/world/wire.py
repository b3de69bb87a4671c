"""The wire as an untrusted caller meets it: its identity is checked, and its messages go through protobuf.

Honest processes pass values directly, which is faster. A shard's messages can be encoded here to check that they fit
the wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from diloco_common.codec import Chunk
from diloco_common.errors import BadRequest, NotSeeded, WrongIdentity
from diloco_common.ports import ShardService
from diloco_common.trust.identity import Identity, check_learner_id
from diloco_common.wire import protobuf
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

MESSAGE_BYTES_MAX = 20 << 20
"""gRPC's limit in production."""

T = TypeVar("T")


class WireDoor:
    """A shard's service for one untrusted caller: a `ports.ShardService`."""

    def __init__(self, service: ShardService, proven: str | None, has_model: Callable[[], bool]) -> None:
        """`proven`: the learner id that this caller has proven, and the only one it can use. None: any.

        `has_model`: whether the shard has a model that can no longer be replaced. A trusted learner brings the first.
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

    async def leave(self, caller: Identity) -> bool:
        self._identify(caller)
        return await self._service.leave(caller)

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
        elif len(part) <= MESSAGE_BYTES_MAX:
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
