"""diloco.v1.ParameterServer on gRPC: reads a message, calls the service, and turns the answer into a message.

Here every call takes a stream of raw messages, even if a caller sends just one. So the caller is checked before any
byte is read, and invalid bytes are refused like any other error.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Self, TypeAlias

import grpc

from diloco_common.codec import Chunk
from diloco_common.errors import BadRequest, Refusal
from diloco_common.ports import ShardService
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.manifest import TensorSpec, check_kinds
from diloco_common.wire.messages import JoinRequest, Progress, PullHeader, PullRequest, PushHeader
from diloco_protos import parameter_server_pb2 as pb
from diloco_server.shell.access import Callers
from diloco_server.shell.quotas import Rate

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Messages: TypeAlias = AsyncIterator[bytes]
Method: TypeAlias = Callable[[Identity, Messages, Context], Any]
"""It returns an awaitable answer or an asynchronous generator of answers."""
JOINS, JOINS_PER_S = 128, 8.0
"""How many Joins one connection may send: at once, and per second in the long run. A refused learner asks about once
per second; many learners share a connection only behind a proxy."""


class ParameterServicer:
    def __init__(
        self,
        service: ShardService,
        run_id: str,
        callers: Callers,
        refused: Callable[[Identity, Refusal], None],
        bearer_token: str | None = None,
        hello: Callable[[], rpc.Metadata] = lambda: (),
    ) -> None:
        """Callers must belong to this run, prove what `callers` requires, and send this bearer token if there is one.

        `refused`: called with caller and cause of every call that ends with an error status. A caller without proof may
        claim any learner id. `hello`: returns the first metadata of the answer to a Join (`rpc.hello`).
        """
        self._service = service
        self._run_id = run_id
        self._callers = callers
        self._refused = refused
        self._bearer_token = bearer_token
        self._hello = hello
        self._joins = Rate("joins on this connection", JOINS, JOINS_PER_S)

    def handler(self) -> grpc.GenericRpcHandler:
        methods = {
            "Join": self._one(self.Join, "Join", "Observe", first=self._hello),
            "Attend": self._many(self.Attend, "Attend", protobuf.serialize),
            "Push": self._one(self.Push, "Push"),
            "Pull": self._many(self.Pull, "Pull", protobuf.pull_response),
            "Leave": self._one(self.Leave, "Leave"),
            "Follow": self._many(self.Follow, "Follow", protobuf.serialize),
        }
        return grpc.method_handlers_generic_handler(rpc.SERVICE, methods)

    async def Join(self, caller: Identity, requests: Messages, context: Context) -> pb.JoinResponse:
        self._joins.take(context.peer(), asyncio.get_running_loop().time())
        request = await self._service.read(caller, partial(_join_request, requests))
        caller.check_may("Observe" if request.observe else "Join")
        return protobuf.join_answer_to_pb(await self._service.join(caller, request))

    async def Attend(self, caller: Identity, requests: Messages, _: Context) -> AsyncGenerator[pb.Directive, None]:
        async with aclosing(self._service.attend(caller, _reports(requests))) as directives:
            async for directive in directives:
                yield protobuf.directive_to_pb(directive)

    async def Push(self, caller: Identity, requests: Messages, _: Context) -> pb.PushResponse:
        return protobuf.answer_to_pb(await self._service.push(caller, _PushParts(requests)))

    async def Pull(
        self, caller: Identity, requests: Messages, context: Context
    ) -> AsyncGenerator[PullHeader | Chunk, None]:
        request = await self._service.read(caller, partial(_pull_request, requests))
        left_s = context.time_remaining()
        async with aclosing(self._service.pull(caller, request, math.inf if left_s is None else left_s)) as parts:
            async for part in parts:
                yield part

    async def Follow(self, caller: Identity, requests: Messages, _: Context) -> AsyncGenerator[pb.Directive, None]:
        message = protobuf.parse(pb.FollowRequest, await self._service.read(caller, partial(only, requests)))
        request = protobuf.follow_request_from_pb(message)
        async with aclosing(self._service.follow(caller, request)) as directives:
            async for directive in directives:
                yield protobuf.directive_to_pb(directive)

    async def Leave(self, caller: Identity, requests: Messages, _: Context) -> pb.LeaveResponse:
        protobuf.parse(pb.LeaveRequest, await self._service.read(caller, partial(only, requests)))
        await self._service.leave(caller)
        return pb.LeaveResponse()

    # ------------------------------------------------------------ around every call

    @asynccontextmanager
    async def admitted(
        self, context: Context, *calls: str, first: Callable[[], rpc.Metadata] | None = None
    ) -> AsyncIterator[Identity]:
        """Hold this around a call that may be one of `calls`; it gives the caller. A refusal ends the call.

        `first`: returns the metadata to send before the answer.
        """
        learner_id = str(dict(context.invocation_metadata() or ()).get("diloco-learner", ""))
        caller = Identity(self._run_id, learner_id, peer=rpc.host_of(context.peer()))
        try:
            caller = self._caller(context)
            caller.check_may(*calls)
            if first is not None:
                # Send it now, while nothing can end the call. A call that ended meanwhile could not be told why,
                # because grpc.aio would send the initial metadata twice (GRPC_CALL_ERROR_TOO_MANY_OPERATIONS).
                await context.send_initial_metadata(first())
            async with self._callers.holding(caller):
                yield caller
        except Refusal as refusal:
            if caller.proof is None:
                caller = self._callers.named(caller, rpc.certificate_of(context))
            self._refused(caller, refusal)
            await rpc.refuse(context, refusal)

    def _caller(self, context: Context) -> Identity:
        metadata, peer = context.invocation_metadata() or (), rpc.host_of(context.peer())
        claimed = rpc.identify(metadata, self._run_id, self._bearer_token, peer)
        return self._callers.proven(claimed, rpc.certificate_of(context))

    def _one(
        self, method: Method, *calls: str, first: Callable[[], rpc.Metadata] | None = None
    ) -> grpc.RpcMethodHandler:
        async def call(requests: Messages, context: Context) -> Any:
            async with self.admitted(context, *calls, first=first) as caller:
                return await method(caller, requests, context)

        return grpc.stream_unary_rpc_method_handler(call, response_serializer=protobuf.serialize)

    def _many(self, method: Method, name: str, serialize: Callable[[Any], bytes]) -> grpc.RpcMethodHandler:
        # Not a generator: gRPC could not end it while it waits for a slow reader.
        async def call(requests: Messages, context: Context) -> None:
            async with (
                self.admitted(context, name, first=tuple) as caller,
                aclosing(method(caller, requests, context)) as answers,
            ):
                async for answer in answers:
                    await context.write(answer)

        return grpc.stream_stream_rpc_method_handler(call, response_serializer=serialize)


async def only(requests: Messages) -> bytes:
    """The first message of a call. Later messages are not read. Raises BadRequest."""
    async for request in requests:
        return request
    raise BadRequest("the call ended without a message")


async def _join_request(requests: Messages) -> JoinRequest:
    """Read a Join. Raises BadRequest without its traceback, which would keep the message in memory."""
    try:
        return await _parsed_join(await only(requests))
    except BadRequest as refusal:
        raise refusal.with_traceback(None) from None


async def _parsed_join(data: bytes) -> JoinRequest:
    """Parse a Join, and let other tasks run while a large model's tensors are read. Raises BadRequest."""
    message = protobuf.parse(pb.JoinRequest, data)
    tensors: list[TensorSpec] = []
    for some in protobuf.tensors_in_turns(message.tensors):
        tensors += some
        await asyncio.sleep(0)
    check_kinds(tensors)
    return protobuf.join_request_from_pb(message, tensors)


async def _pull_request(requests: Messages) -> PullRequest:
    return protobuf.pull_request_from_pb(protobuf.parse(pb.PullRequest, await only(requests)))


async def _reports(requests: Messages) -> AsyncIterator[Progress]:
    async for request in requests:
        yield protobuf.progress_from_pb(protobuf.parse(pb.Progress, request))


class _PushParts:
    """The header and chunks of a push as they arrive. It is not a generator, which would add a step per chunk."""

    def __init__(self, requests: Messages) -> None:
        self._requests = requests

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PushHeader | Chunk:
        """Raises BadRequest."""
        return protobuf.push_part(await anext(self._requests))
