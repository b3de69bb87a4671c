"""diloco.v1.ParameterServer on gRPC: read the message, call the service, turn the answer into a message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias

import grpc

from diloco_common import protobuf, rpc
from diloco_common.errors import Refusal
from diloco_common.identity import Identity
from diloco_common.messages import Progress, PullHeader, PushHeader
from diloco_common.ports import ShardService
from diloco_protos import parameter_server_pb2 as pb
from diloco_protos import parameter_server_pb2_grpc as pb_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ParameterServer(pb_grpc.ParameterServerServicer):
    """Every shard serves this."""

    def __init__(
        self, service: ShardService, run_id: str, bearer_token: str | None, refused: Callable[[str, str, str], None]
    ) -> None:
        """Callers must be of this run, and send this bearer token if there is one.

        `refused` is told learner id, code and words of every call that ends with an error status.
        """
        self._service = service
        self._run_id = run_id
        self._bearer_token = bearer_token
        self._refused = refused

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        try:
            answer = await self._service.join(self._caller(context), protobuf.join_request_from_pb(request))
            return protobuf.join_answer_to_pb(answer)
        except Refusal as refusal:
            await self._refuse(context, refusal)

    async def Attend(self, requests: AsyncIterator[pb.Progress], context: Context) -> AsyncIterator[pb.Directive]:
        try:
            async with aclosing(self._service.attend(self._caller(context), _reports(requests))) as directives:
                async for directive in directives:
                    yield protobuf.directive_to_pb(directive)
        except Refusal as refusal:
            await self._refuse(context, refusal)

    async def Push(self, requests: AsyncIterator[pb.PushRequest], context: Context) -> pb.PushResponse:
        try:
            return protobuf.answer_to_pb(await self._service.push(self._caller(context), _push_parts(requests)))
        except Refusal as refusal:
            await self._refuse(context, refusal)

    async def Pull(self, request: pb.PullRequest, context: Context) -> AsyncIterator[pb.PullResponse]:
        try:
            caller = self._caller(context)
            async with aclosing(self._service.pull(caller, protobuf.pull_request_from_pb(request))) as parts:
                async for part in parts:
                    yield _pull_response(part)
        except Refusal as refusal:
            await self._refuse(context, refusal)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        try:
            await self._service.leave(self._caller(context))
            return pb.LeaveResponse()
        except Refusal as refusal:
            await self._refuse(context, refusal)

    def _caller(self, context: Context) -> Identity:
        return rpc.identify(context.invocation_metadata() or (), self._run_id, self._bearer_token)

    async def _refuse(self, context: Context, refusal: Refusal) -> NoReturn:
        learner_id = dict(context.invocation_metadata() or ()).get("diloco-learner", "")
        self._refused(str(learner_id), refusal.code, str(refusal))
        await rpc.refuse(context, refusal)


async def _reports(requests: AsyncIterator[pb.Progress]) -> AsyncIterator[Progress]:
    async for request in requests:
        yield protobuf.progress_from_pb(request)


async def _push_parts(requests: AsyncIterator[pb.PushRequest]) -> AsyncIterator[PushHeader | bytes]:
    """The header and the chunks. A message that holds neither is an empty chunk."""
    async for request in requests:
        if request.WhichOneof("part") == "header":
            yield protobuf.push_header_from_pb(request.header)
        else:
            yield request.chunk


def _pull_response(part: PullHeader | bytes) -> pb.PullResponse:
    if isinstance(part, PullHeader):
        return pb.PullResponse(header=protobuf.pull_header_to_pb(part))
    return pb.PullResponse(chunk=part)
