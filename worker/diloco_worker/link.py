"""The connection of a learner to one shard: join, attend, pull what is announced, push what was taken.

Lives in the network thread. Control, pushes and pulls have a channel each, so that bulk never starves a heartbeat.
Connections come and go; the training thread only sees what `Inbox` brings it.

    dial --Join--> attending --stream broken--> wait (jittered) --Attend--> attending ...
                       |---- lease over ------> wait ----------> Join
                       |---- refused for good -> Failed
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
from torch import Tensor

from diloco_common import rpc
from diloco_common.codec import Payload
from diloco_common.errors import (
    BadRequest,
    Busy,
    DilocoError,
    Draining,
    LeaseExpired,
    NotFinite,
    NotJoined,
    NotSeeded,
    Refusal,
    StaleGeneration,
    Stalled,
    WrongEpoch,
)
from diloco_common.logs import Log
from diloco_common.manifest import Manifest, TensorSpec
from diloco_common.messages import (
    Collect,
    Committed,
    Directive,
    Drain,
    Evicted,
    LearnerPolicy,
    Outcome,
    Progress,
    Pulse,
    PushAnswer,
    PushHeader,
    Stop,
)
from diloco_common.metrics import WorkerMetrics
from diloco_protos import parameter_server_pb2 as pb
from diloco_protos import parameter_server_pb2_grpc as pb_grpc
from diloco_worker.core.backoff import backoff_s
from diloco_worker.core.fragment import Pending
from diloco_worker.inbox import Answered, Arrived, Asked, Failed, Inbox, Joined, Stopped
from diloco_worker.transfer import CALL_S, Transfer

JOIN_AGAIN = (NotJoined, LeaseExpired, Stalled, StaleGeneration, WrongEpoch)
"""The lease is over, or a repeated Join of this very process replaced it; a new one is to be had."""
TRY_AGAIN = (Draining, Busy, NotSeeded)
"""Not now."""
Lease = tuple[int, int]
"""Epoch and generation: generations count anew in each epoch."""
SILENCE_HEARTBEATS = 2.5
"""A shard that says nothing for so many heartbeats is frozen or cut off: dial again."""
STEADY_S = 5.0
"""A connection that held for so long is dialed again without the wait that its predecessors earned."""
GOODBYE_S = 1.0
SEED_ENCODING = "float32"
SEEDS_AT_ONCE = 2
"""Seeds encoded and pushed at once; a shard refuses more than a few of all learners together."""
REPORT_EVERY_S = 0.02
"""Reports of inner steps that follow faster are drawn together."""
ANNOUNCE_WAIT_S = 10.0
"""How often a learner that cannot reach a shard says so."""


@dataclass(frozen=True)
class LinkContext:
    """What all links of one learner share."""

    run_id: str
    learner_id: str
    instance: str
    token: str | None
    tensors: tuple[TensorSpec, ...]
    inbox: Inbox
    transfer: Transfer
    metrics: WorkerMetrics
    log: Log
    progress: Callable[[], Progress]
    """The learner's latest report."""
    connected: set[str] = field(default_factory=set)
    """Addresses of the shards whose control stream is up."""


class ShardLink:
    """One shard, seen from one learner."""

    def __init__(self, address: str, context: LinkContext) -> None:
        self.address = address
        self.connected = False
        self.shard_index: int | None = None
        self.generation = 0
        self.epoch = 0
        self.pulse = Pulse(0, 0, 0)
        self.connections = 0
        """How often a control stream was up."""
        self._c = context
        self._leaving = False
        self._heartbeat_s = 1.0
        self._policy: LearnerPolicy | None = None
        self._manifest: Manifest | None = None
        self._announced: dict[int, int] = {}  # fragment -> version to pull, in this epoch
        self._fetched: dict[int, tuple[int, int]] = {}  # fragment -> (epoch, version) handed to the inbox
        self._news = asyncio.Event()  # something to pull
        self._stepped = asyncio.Event()  # something to report
        self._encoded: dict[int, tuple[Pending, asyncio.Task[Payload]]] = {}
        self._pushes: set[asyncio.Task[None]] = set()
        self._seeding = asyncio.Semaphore(SEEDS_AT_ONCE)
        self._channels: list[grpc.aio.Channel] = []

    # ------------------------------------------------------------ for the network thread

    async def run(self) -> None:
        """Keep the link up until cancelled, or until the shard refuses for good."""
        self._control, self._bulk_up, self._bulk_down = (self._dial() for _ in range(3))
        puller = asyncio.create_task(self._pull_news(), name=f"pull {self.address}")
        try:
            await self._stay_connected()
        except Refusal as refusal:
            self._c.log.error("refused", shard=self.address, code=refusal.code, why=refusal)
            self._c.inbox.put(Failed(refusal))
        except Exception as error:  # ours: say so, rather than leave a learner that hears nothing
            self._c.log.error("link failed", trace=error, shard=self.address)
            self._c.inbox.put(Failed(DilocoError(f"the link to {self.address} failed: {error!r}")))
        finally:
            puller.cancel()
            for push in self._pushes:
                push.cancel()
            for channel in self._channels:
                await channel.close(GOODBYE_S)  # the stream may end before Leave is answered

    def know(self, manifest: Manifest) -> None:
        """The model is cut: fragments can be pulled now."""
        self._manifest = manifest
        self._news.set()

    def stepped(self) -> None:
        """There is new progress to report."""
        self._stepped.set()

    def push(self, pending: Pending) -> None:
        """Encode and push a contribution in the background; its outcome comes to the inbox."""
        name = f"push {pending.fragment_id} of round {pending.round} under {self._lease}"
        if not any(task.get_name() == name for task in self._pushes):  # a round may ask twice
            self._start_push(self._push_contribution(pending, self._lease), name)

    def seed(self, fragment_id: int, values: Tensor, tokens_merged: int) -> None:
        """Offer the values of version 0 in the background; first writer wins."""
        self._start_push(self._push_seed(fragment_id, values, tokens_merged, self._lease), f"seed {fragment_id}")

    async def settle(self, timeout_s: float) -> None:
        """Give pushes that are under way time to be answered."""
        if self._pushes and self.connected:
            await asyncio.wait(self._pushes, timeout=timeout_s)

    async def leave(self) -> None:
        """Say goodbye, if anybody is there."""
        self._leaving = True
        if self.connected:
            try:
                await self._control.Leave(pb.LeaveRequest(), metadata=self._metadata(), timeout=GOODBYE_S)
            except grpc.aio.AioRpcError as error:
                self._c.log.debug("goodbye not heard", shard=self.address, why=error.code().name)

    # ------------------------------------------------------------ control

    async def _stay_connected(self) -> None:
        attempt, waited_s = 0, 0.0
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                if not self.generation:
                    await self._join()
                await self._attend()
                why = "the stream ended"
            except JOIN_AGAIN as refusal:
                self.generation = 0
                why = str(refusal)
            except TRY_AGAIN as refusal:
                why = str(refusal)
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name.lower()}: {error.details()}"
            except TimeoutError:
                why = f"silent for {self._silence_s():.1f} s"
            finally:
                self._disconnected()
            if self._leaving:
                return
            if clock() - began > STEADY_S:
                attempt, waited_s = 0, 0.0
            delay_s = backoff_s(attempt, random.random())
            if attempt == 0 or waited_s >= ANNOUNCE_WAIT_S:
                self._c.log.warning("no connection, trying again", shard=self.address, why=why)
                waited_s = 0.0
            await asyncio.sleep(delay_s)
            attempt, waited_s = attempt + 1, waited_s + delay_s

    async def _join(self) -> None:
        """Get a lease. Raises a Refusal or AioRpcError."""
        request = pb.JoinRequest(
            protocol=rpc.PROTOCOL,
            instance=self._c.instance,
            tensors=rpc.tensors_to_pb(self._c.tensors),
            decodes=list(rpc.DECODES),
        )
        metadata = rpc.Identity(self._c.run_id, self._c.learner_id).metadata(self._c.token)
        try:
            answer = await self._control.Join(request, metadata=metadata, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.refusal_of(error) or error from None
        if answer.epoch != self.epoch:
            self._announced.clear()
            self._encoded.clear()
        self.generation, self.epoch = answer.generation, answer.epoch
        self.shard_index = answer.shard_index
        self._heartbeat_s = answer.heartbeat_s
        self._policy = rpc.policy_from_pb(answer.policy)
        self.pulse = rpc.pulse_from_pb(answer.pulse)
        statuses = tuple(rpc.status_from_pb(s) for s in answer.fragments)
        self._c.inbox.put(
            Joined(
                self.address, answer.shard_index, answer.num_shards, answer.num_fragments, answer.manifest_digest,
                self._policy, self.epoch, statuses,
            )
        )  # fmt: skip
        self._c.log.event("joined", shard=self.address, index=self.shard_index, generation=self.generation)

    async def _attend(self) -> None:
        """Hold the control stream until it breaks. Raises what broke it."""
        call = self._control.Attend(metadata=self._metadata())
        reporting = asyncio.create_task(self._report(call), name=f"report {self.address}")
        try:
            while True:
                async with asyncio.timeout(self._silence_s()):  # wait_for can swallow a cancellation before 3.12
                    message = await call.read()
                if message is rpc.EOF:
                    return
                if not self.connected:
                    self._connected()
                directive = rpc.directive_from_pb(message)
                if directive is not None:
                    self._hear(directive)
        except grpc.aio.AioRpcError as error:
            raise rpc.refusal_of(error) or error from None
        finally:
            reporting.cancel()
            call.cancel()

    async def _report(self, call: grpc.aio.StreamStreamCall) -> None:
        """Send progress after inner steps, and as a heartbeat when there is none."""
        try:
            while True:
                await call.write(rpc.progress_to_pb(self._c.progress()))
                self._stepped.clear()
                await asyncio.sleep(REPORT_EVERY_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._heartbeat_s - REPORT_EVERY_S):
                        await self._stepped.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same and says why

    def _hear(self, directive: Directive) -> None:
        match directive:
            case Collect():
                self._c.inbox.put(Asked(directive, self.epoch))
            case Committed():
                self._announced[directive.fragment_id] = directive.version
                self._news.set()
            case Pulse():
                self.pulse = directive
            case Stop():
                assert self.shard_index is not None
                self._c.inbox.put(Stopped(self.shard_index))
            case Drain():
                self._c.log.event("shard is shutting down", shard=self.address)
            case Evicted():
                raise rpc.refusal_from(directive.code, directive.message)

    # ------------------------------------------------------------ bulk

    async def _pull_news(self) -> None:
        """Pull each announced version, one after the other, and again when a newer one is announced."""
        attempt = 0
        while True:
            await self._news.wait()
            self._news.clear()
            if self._manifest is None:
                continue
            for fragment_id, version in sorted(self._announced.items()):
                if self._fetched.get(fragment_id) == (self.epoch, version) or not self.generation:
                    continue
                try:
                    await self._pull(fragment_id)
                    attempt = 0
                except (grpc.aio.AioRpcError, Refusal) as error:
                    self._c.log.debug("pull failed", shard=self.address, fragment=fragment_id, why=error)
                    self._news.set()
                    await asyncio.sleep(backoff_s(attempt, random.random()))
                    attempt += 1

    async def _pull(self, fragment_id: int) -> None:
        assert self._manifest is not None
        assert self._policy is not None
        request = pb.PullRequest(fragment_id=fragment_id, encodings=[self._policy.pull_encoding], epoch=self.epoch)
        known = self._fetched.get(fragment_id)
        if known is not None and known[0] == self.epoch:
            request.have_version = known[1]
        num_elements = self._manifest.fragments[fragment_id].num_elements
        pulled = await self._c.transfer.pull(self._bulk_down, request, self._metadata(), num_elements)
        if pulled is None:
            return
        self._fetched[fragment_id] = (pulled.epoch, pulled.version)
        self._forget(fragment_id, pulled.version)
        self._c.inbox.put(Arrived(fragment_id, pulled.version, pulled.epoch, pulled.values, pulled.merged_version))

    async def _push_contribution(self, pending: Pending, lease: Lease) -> None:
        fragment_id, round_number = pending.fragment_id, pending.round
        try:
            payload = await self._payload(pending)
        except NotFinite as error:
            self._c.log.error("contribution is not finite", fragment=fragment_id, round=round_number, why=error)
            self._c.inbox.put(Answered(fragment_id, round_number, PushAnswer(Outcome.REJECTED, error.code, str(error))))
            return
        header = self._header(
            fragment_id, round_number, pending.base_version, pending.tokens, pending.steps, payload, 0, pending.epoch
        )
        answer = await self._push_until_answered(header, payload, lease)
        if answer is not None:
            self._c.inbox.put(Answered(fragment_id, round_number, answer))

    def _forget(self, fragment_id: int, version: int) -> None:
        """The fate of contributions up to this version is known: their bytes are not pushed again."""
        known = self._encoded.get(fragment_id)
        if known is not None and known[0].round <= version:
            del self._encoded[fragment_id]

    async def _push_seed(self, fragment_id: int, values: Tensor, tokens_merged: int, lease: Lease) -> None:
        async with self._seeding:
            if fragment_id in self._announced:  # another learner was first
                return
            try:
                payload = await self._c.transfer.encode(values, SEED_ENCODING, keep_loss=False)
            except NotFinite as error:  # nobody could train on it, and without a seed all would wait
                self._c.inbox.put(Failed(NotFinite(f"this model cannot seed fragment {fragment_id}: {error}")))
                return
            header = self._header(fragment_id, 0, 0, 0, 0, payload, tokens_merged)
            await self._push_until_answered(header, payload, lease)

    async def _payload(self, pending: Pending) -> Payload:
        """The encoded contribution; encoded once, since encoding leaves the loss in `delta`. Raises NotFinite."""
        assert self._policy is not None
        known = self._encoded.get(pending.fragment_id)
        if known is None or known[0] is not pending:
            keep_loss = self._policy.error_feedback
            encoding = self._c.transfer.encode(pending.delta, self._policy.push_encoding, keep_loss=keep_loss)
            known = (pending, asyncio.create_task(encoding))
            self._encoded[pending.fragment_id] = known
        return await known[1]

    async def _push_until_answered(self, header: PushHeader, payload: Payload, lease: Lease) -> PushAnswer | None:
        """Push, again and again while it cannot be heard. None: the lease is over, and what was answered under it.

        A contribution may have been accepted even so; only a version tells, and a round that still wants it asks again.
        """
        attempt = 0
        while lease == self._lease:
            try:
                answer = await self._c.transfer.push(self._bulk_up, header, payload, self._metadata())
            except grpc.aio.AioRpcError as error:
                refusal = rpc.refusal_of(error)
                if refusal is not None and not isinstance(refusal, TRY_AGAIN):
                    self._c.log.warning("push refused", fragment=header.fragment_id, code=refusal.code, why=refusal)
                    return None
                self._c.metrics.pushed("failed", 0)
                await asyncio.sleep(backoff_s(attempt, random.random()))
                attempt += 1
                continue
            if lease != self._lease:  # a later contribution may have the same fragment and round
                return None
            if answer.outcome is Outcome.REJECTED:
                self._c.log.warning(
                    "contribution refused", fragment=header.fragment_id, code=answer.code, why=answer.message
                )
            return answer
        return None

    # ------------------------------------------------------------ helpers

    def _dial(self) -> pb_grpc.ParameterServerStub:
        channel = grpc.aio.insecure_channel(self.address, options=rpc.CHANNEL_OPTIONS)
        self._channels.append(channel)
        return pb_grpc.ParameterServerStub(channel)  # type: ignore[no-untyped-call]

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        identity = rpc.Identity(self._c.run_id, self._c.learner_id, self.generation, self.epoch)
        return identity.metadata(self._c.token)

    def _header(
        self, fragment_id: int, round_number: int, base_version: int, tokens: int, steps: int, payload: Payload,
        tokens_merged: int, epoch: int | None = None,
    ) -> PushHeader:  # fmt: skip
        if self._manifest is None:
            raise BadRequest("nothing can be pushed before the model is cut")
        return PushHeader(
            fragment_id, round_number, self.epoch if epoch is None else epoch, base_version, tokens, steps,
            payload.header, self._manifest.digest, tokens_merged,
        )  # fmt: skip

    def _start_push(self, push: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(push, name=name)
        self._pushes.add(task)
        task.add_done_callback(self._push_ended)

    def _push_ended(self, task: asyncio.Task[None]) -> None:
        self._pushes.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._c.log.error("push failed", trace=task.exception(), push=task.get_name())

    def _connected(self) -> None:
        self.connected = True
        self.connections += 1
        self._c.connected.add(self.address)
        self._c.metrics.connected(len(self._c.connected))
        if self.connections > 1:
            self._c.metrics.reconnected()

    def _disconnected(self) -> None:
        self.connected = False
        self._c.connected.discard(self.address)
        self._c.metrics.connected(len(self._c.connected))

    @property
    def _lease(self) -> Lease:
        return self.epoch, self.generation

    def _silence_s(self) -> float:
        return SILENCE_HEARTBEATS * self._heartbeat_s
