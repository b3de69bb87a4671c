"""diloco.v1.ParameterServer on gRPC: read the message, call the core, turn the answer into a message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, NoReturn, TypeAlias

import grpc

from diloco_common import protobuf, rpc
from diloco_common.codec import PayloadReceiver
from diloco_common.codec.change import pull_encodings
from diloco_common.errors import BadRequest, Busy, Draining, ProtocolMismatch, Refusal, TornUpload, UnknownEncoding
from diloco_common.identity import Identity
from diloco_common.messages import Evicted, PushAnswer, PushHeader
from diloco_protos import parameter_server_pb2 as pb
from diloco_protos import parameter_server_pb2_grpc as pb_grpc
from diloco_server.core.membership import Member
from diloco_server.host import ControlStream, ShardHost

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

OBSERVERS_AT_ONCE = 4
"""Pulls that may be open at once in an encoding made for their caller alone; more are answered BUSY."""
OBSERVER_ENCODINGS = ("float32",)
"""Taken by Pull besides the run's own: encoded for the caller alone."""

PROCESS_ID_MAX = 64
"""Characters of what tells a process from others of its learner id: it is kept, and written into every version."""

SEEDS_AT_ONCE = 4
"""Seeds received at once, of different fragments. Learners that start together all bring the whole model in float32:
taken all at once, that is many times the memory that the shard needs for it."""


class ParameterServer(pb_grpc.ParameterServerServicer):
    """Every shard serves this."""

    def __init__(self, host: ShardHost, token: str | None) -> None:
        self._host = host
        self._token = token
        self._pushes = 0  # open now
        self._observers = 0  # pulls open now whose bytes are made for them alone
        self._seeding: set[int] = set()  # fragments whose seed is coming in

    # ------------------------------------------------------------ the five calls

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        host, shard = self._host, self._host.shard
        try:
            caller = self._identify(context)
            if request.protocol != rpc.PROTOCOL:
                raise ProtocolMismatch(
                    f"this shard speaks protocol {rpc.PROTOCOL}, the caller {request.protocol}; install equal versions"
                )
            tensors = protobuf.tensors_from_pb(request.tensors)
            if request.observe:
                shard.observe(tensors)
                return self._join_response("", 0, tensors_too=True)
            if len(request.process_id) > PROCESS_ID_MAX:
                raise BadRequest(
                    f"process_id has {len(request.process_id)} characters, at most {PROCESS_ID_MAX} are taken"
                )
            if not caller.learner_id:
                raise BadRequest("metadata diloco-learner is missing")
            self._check_decodes(request.decodes)
            held = protobuf.held_from_pb(request.held)
            member = shard.join(caller.learner_id, request.process_id, tensors, host.clock(), held)
            host.advance()
            return self._join_response(member.learner_id, member.generation)
        except Refusal as refusal:
            await self._refuse(context, refusal)

    async def Attend(self, requests: AsyncIterator[pb.Progress], context: Context) -> AsyncIterator[pb.Directive]:
        try:
            member = self._member(context)
        except Refusal as refusal:
            await self._refuse(context, refusal)
        stream = self._host.open_stream(member)
        reader = asyncio.create_task(self._read_progress(requests, context, stream), name="attend")
        try:
            while (directive := await stream.next()) is not None:
                yield protobuf.directive_to_pb(directive)
                if isinstance(directive, Evicted):
                    break
            if reader.done():
                reader.result()  # raises what ended it, such as bytes that are no message
        finally:
            reader.cancel()
            self._host.close_stream(stream)

    async def Push(self, requests: AsyncIterator[pb.PushRequest], context: Context) -> pb.PushResponse:
        try:
            member = self._member(context)
            limit = self._host.settings.shard.max_pushes
            if self._pushes >= limit:
                raise Busy(f"{limit} pushes are open (shard.max_pushes); try again in a moment")
            self._pushes += 1
            try:
                return protobuf.answer_to_pb(await self._push(member, requests, context))
            finally:
                self._pushes -= 1
        except Refusal as refusal:
            await self._refuse(context, refusal)

    async def Pull(self, request: pb.PullRequest, context: Context) -> AsyncIterator[pb.PullResponse]:
        host, observers = self._host, 0
        try:
            try:
                caller = self._identify(context)
                if caller.generation:
                    host.shard.check(caller.learner_id, caller.generation, caller.epoch)
                _, values = host.shard.published(request.fragment_id)
                theirs = request.epoch, request.have_version if request.HasField("have_version") else None
                change = host.shard.change_since(request.fragment_id, *theirs)
                made = {p.header.encoding: p for p in (change, values) if p is not None}
                encoding = self._choose_encoding(request.encodings, made)
                header = self._pull_header(request, caller)
                payload = made.get(encoding)
                if theirs == (header.epoch, header.version):
                    payload = None
                elif payload is None:
                    if self._observers >= OBSERVERS_AT_ONCE:
                        raise Busy(f"{OBSERVERS_AT_ONCE} pulls in an encoding of their own are open; try again soon")
                    observers = 1
                    self._observers += observers
                    await host.until_announced(request.fragment_id)
                    header = self._pull_header(request, caller)  # of the very values that are read next
                    payload = await host.encode(request.fragment_id, encoding)
            except Refusal as refusal:
                await self._refuse(context, refusal)
            if payload is not None:
                header.payload.CopyFrom(protobuf.payload_to_pb(payload.header))
                if payload is change:
                    header.base_version = request.have_version
            yield pb.PullResponse(header=header)
            for chunk in payload.chunks if payload is not None else ():
                yield pb.PullResponse(chunk=chunk)
                host.observer.sent(len(chunk))
        finally:
            self._observers -= observers

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        try:
            caller = self._identify(context)
            current = self._host.shard.membership.get(caller.learner_id)
            if current is not None and current.live and current.generation == caller.generation:
                self._host.leave(self._member(context))
            return pb.LeaveResponse()
        except Refusal as refusal:
            await self._refuse(context, refusal)

    # ------------------------------------------------------------ parts of them

    def _identify(self, context: Context) -> Identity:
        metadata = context.invocation_metadata() or ()
        return rpc.identify(metadata, self._host.settings.run.id, self._token)

    def _member(self, context: Context) -> Member:
        caller = self._identify(context)
        return self._host.shard.check(caller.learner_id, caller.generation, caller.epoch)

    def _join_response(self, learner_id: str, generation: int, *, tensors_too: bool = False) -> pb.JoinResponse:
        shard, settings = self._host.shard, self._host.settings
        assert shard.manifest is not None
        return pb.JoinResponse(
            generation=generation,
            epoch=shard.epoch,
            heartbeat_s=settings.lease.heartbeat_s,
            shard_index=settings.shard.index,
            num_shards=settings.shard.count,
            num_fragments=settings.sync.fragments,
            manifest_digest=shard.manifest.digest,
            policy=protobuf.policy_to_pb(shard.policy()),
            fragments=[protobuf.status_to_pb(s) for s in shard.fragment_statuses(learner_id)],
            pulse=protobuf.pulse_to_pb(shard.pulse()),
            tensors=protobuf.tensors_to_pb(shard.manifest.tensors) if tensors_too else [],
        )

    def _pull_header(self, request: pb.PullRequest, caller: Identity) -> pb.PullHeader:
        """What is said of the latest version, all of it at this moment."""
        state = self._host.shard.owned(request.fragment_id)
        status = state.status(caller.learner_id)
        return pb.PullHeader(
            fragment_id=status.fragment_id,
            version=status.version,
            epoch=status.epoch,
            merged_version=status.merged_version,
            forgotten_version=status.forgotten_version,
            tokens_merged=state.tokens_merged,
        )

    def _check_decodes(self, decodes: Any) -> None:
        needed = pull_encodings(self._host.settings.sync.pull)
        if not set(needed) <= set(decodes):
            raise UnknownEncoding(
                f"versions are sent as {' and '.join(needed)} (sync.pull), "
                f"the learner decodes {', '.join(decodes) or 'nothing'}"
            )

    def _choose_encoding(self, wanted: Any, made: Iterable[str]) -> str:
        """What a caller gets: the first that it takes of those that are made, best first, or can be made for it."""
        offered = tuple(dict.fromkeys((*made, *OBSERVER_ENCODINGS)))
        for encoding in wanted or offered[:1]:
            if encoding in offered:
                return str(encoding)
        raise UnknownEncoding(f"versions are sent as {' or '.join(offered)}, not as {', '.join(wanted)[:100]}")

    async def _read_progress(
        self, requests: AsyncIterator[pb.Progress], context: Context, stream: ControlStream
    ) -> None:
        """Hand the learner's reports to the core until its side ends; then end ours."""
        shard = self._host.shard
        try:
            async for message in requests:
                member = self._member(context)
                shard.progress(member, protobuf.progress_from_pb(message), self._host.clock())
                self._host.advance_soon()
        except Refusal as refusal:
            stream.send(Evicted(refusal.code, str(refusal)))
        finally:
            stream.end()

    async def _push(self, member: Member, requests: AsyncIterator[pb.PushRequest], context: Context) -> PushAnswer:
        host, shard = self._host, self._host.shard
        header = await self._push_header(requests)
        answer = shard.admit(member, header)
        if answer is not None:
            return host.answered(member, header, answer)
        if not header.is_seed:
            return await self._receive(member, header, requests, context)
        if header.fragment_id in self._seeding or len(self._seeding) >= SEEDS_AT_ONCE:
            raise Busy(f"others are bringing {len(self._seeding)} fragments; try again in a moment")
        self._seeding.add(header.fragment_id)
        try:
            return await self._receive(member, header, requests, context)
        finally:
            self._seeding.remove(header.fragment_id)

    async def _receive(
        self, member: Member, header: PushHeader, requests: AsyncIterator[pb.PushRequest], context: Context
    ) -> PushAnswer:
        """Take the bytes of a push that was admitted by its header."""
        host, shard = self._host, self._host.shard
        try:
            receiver = PayloadReceiver(header.payload)
            while (part := await self._next_part(requests, header)) is not None:
                if part.WhichOneof("part") != "chunk":
                    raise BadRequest("after its header a push has chunks only")
                receiver.add(part.chunk)
                host.observer.received(len(part.chunk))
            if not receiver.is_complete:  # a connection broke, or the sender did: the round still waits for it
                raise TornUpload(f"fragment {header.fragment_id}: the bytes stopped before all were there; push again")
            payload = receiver.finish()
            norms = await host.inspect(header, payload)
        except (TornUpload, Draining):
            raise
        except Refusal as refusal:
            return host.answered(member, header, shard.reject(member, header, refusal))
        member = self._member(context)  # the lease may have ended while the bytes came
        return host.answered(member, header, shard.contribute(member, header, payload, norms, host.clock()))

    async def _push_header(self, requests: AsyncIterator[pb.PushRequest]) -> PushHeader:
        first = await self._next_part(requests)
        if first is None or first.WhichOneof("part") != "header":
            raise BadRequest("a push begins with its header")
        return protobuf.push_header_from_pb(first.header)

    async def _next_part(
        self, requests: AsyncIterator[pb.PushRequest], header: PushHeader | None = None
    ) -> pb.PushRequest | None:
        """The next message; None at the end. Who pauses for longer than a lease and a slow chunk take is cut off."""
        wait_s = self._host.settings.lease.lease_s
        if header is not None:
            wait_s += rpc.PUSHES_AT_ONCE * header.payload.chunk_bytes(0) / rpc.SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(wait_s):
                return await anext(requests, None)
        except TimeoutError:
            raise TornUpload(f"no chunk came for {wait_s:.0f} s; push again") from None

    async def _refuse(self, context: Context, refusal: Refusal) -> NoReturn:
        learner_id = dict(context.invocation_metadata() or ()).get("diloco-learner", "")
        self._host.observer.call_refused(str(learner_id), refusal.code, str(refusal))
        await rpc.refuse(context, refusal)
