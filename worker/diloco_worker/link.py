"""The connection of a learner to one shard: join, attend, and keep at it.

Lives in the network thread. Control, pushes (pusher.py) and pulls (puller.py) have a channel each, so that bulk never
starves a heartbeat. Connections come and go; the training thread only sees what `Inbox` brings it.

    dial --Join--> attending --stream broken--> wait (jittered) --Attend--> attending ...
                       |---- lease over ------> wait ----------> Join
                       |---- refused for good -> Failed
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc
from torch import Tensor

from diloco_common import protobuf, rpc
from diloco_common.errors import DilocoError, Refusal, Superseded
from diloco_common.identity import Identity
from diloco_common.manifest import Manifest
from diloco_common.messages import Collect, Committed, Directive, Drain, Evicted, Pulse, Stop
from diloco_protos import parameter_server_pb2 as pb
from diloco_protos import parameter_server_pb2_grpc as pb_grpc
from diloco_worker.core.dialing import JOIN_AGAIN, SILENCE_HEARTBEATS, STEADY_S, TRY_AGAIN, backoff_s
from diloco_worker.core.events import Asked, Failed, Joined, Stopped
from diloco_worker.core.fragment import Pending
from diloco_worker.puller import Puller
from diloco_worker.pusher import Pusher
from diloco_worker.session import LinkContext, Session
from diloco_worker.transfer import CALL_S

GOODBYE_S = 1.0
REPORT_EVERY_S = 0.02
"""Reports of inner steps that follow faster are drawn together."""
ANNOUNCE_WAIT_S = 10.0
"""How often a learner that cannot reach a shard says so."""


class ShardLink:
    """One shard, seen from one learner."""

    def __init__(self, address: str, context: LinkContext) -> None:
        self.session = Session(address, context)
        self.connected = False
        self.connections = 0
        """How often a control stream was up."""
        self.pulse = Pulse(0, 0)
        self._c = context
        self._pusher = Pusher(self.session, self._is_announced)
        self._puller = Puller(self.session, self._pusher.forget)
        self._leaving = False
        self._stepped = asyncio.Event()  # something to report
        self._channels: list[grpc.aio.Channel] = []

    @property
    def address(self) -> str:
        return self.session.address

    # ------------------------------------------------------------ for the network thread

    async def run(self) -> None:
        """Keep the link up until cancelled, or until the shard refuses for good."""
        self._control = self._dial(rpc.CHANNEL_OPTIONS)
        self._pusher.dialed(self._dial(rpc.BULK_CHANNEL_OPTIONS))
        pulling = self._puller.run(self._dial(rpc.BULK_CHANNEL_OPTIONS))
        puller = asyncio.create_task(pulling, name=f"pull {self.address}")
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
            self._pusher.cancel()
            for channel in self._channels:
                await channel.close(GOODBYE_S)  # the stream may end before Leave is answered

    def know(self, manifest: Manifest) -> None:
        """The model is cut: fragments can be pulled now."""
        self.session.manifest = manifest
        self._puller.look()

    def stepped(self) -> None:
        """There is new progress to report."""
        self._stepped.set()

    def push(self, pending: Pending) -> None:
        """Push a contribution in the background; its outcome comes to the inbox."""
        self._pusher.push(pending)

    def seed(self, fragment_id: int, values: Tensor, hold_s: float) -> None:
        """Offer the values of version 0 in the background, after `hold_s` seconds; first writer wins."""
        self._pusher.seed(fragment_id, values, hold_s)

    async def settle(self, timeout_s: float) -> None:
        """Give pushes that are under way time to be answered."""
        if self.connected:
            await self._pusher.settle(timeout_s)

    async def leave(self) -> None:
        """Say goodbye, if anybody is there."""
        self._leaving = True
        if self.connected:
            try:
                await self._control.Leave(pb.LeaveRequest(), metadata=self.session.metadata(), timeout=GOODBYE_S)
            except grpc.aio.AioRpcError as error:
                self._c.log.debug("goodbye not heard", shard=self.address, why=error.code().name)

    # ------------------------------------------------------------ control

    async def _stay_connected(self) -> None:
        attempt, waited_s = 0, 0.0
        clock = asyncio.get_running_loop().time
        while True:
            began, had_lease = clock(), self.session.generation > 0
            try:
                if not self.session.generation:
                    await self._join()
                await self._attend()
                why = "the stream ended"
            except JOIN_AGAIN as refusal:
                self.session.generation = 0
                why = str(refusal)
                if had_lease:  # the shard answers, so a new one is to be had without the waits of its silence
                    attempt, waited_s = 0, 0.0
            except TRY_AGAIN as refusal:
                why = str(refusal)
            except Refusal as refusal:
                if not self.connections or isinstance(refusal, Superseded):
                    raise  # wrong from the start, or another process is this learner now
                why = f"{refusal} [{refusal.code}]"  # a shard came back as another one: others need not stop for it
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
            process_id=self._c.process_id,
            tensors=protobuf.tensors_to_pb(self._c.tensors),
            decodes=list(rpc.DECODES),
            held=protobuf.held_to_pb(self._puller.held()),
        )
        metadata = rpc.metadata_of(Identity(self._c.run_id, self._c.learner_id), self._c.token)
        try:
            answer = await self._control.Join(request, metadata=metadata, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.refusal_of(error) or error from None
        session = self.session
        if answer.epoch != session.epoch:
            self._puller.begin_epoch()
            self._pusher.begin_epoch()
        session.generation, session.epoch = answer.generation, answer.epoch
        session.shard_index = answer.shard_index
        session.heartbeat_s = answer.heartbeat_s
        session.policy = policy = protobuf.policy_from_pb(answer.policy)
        self.pulse = protobuf.pulse_from_pb(answer.pulse)
        statuses = tuple(protobuf.status_from_pb(s) for s in answer.fragments)
        self._c.inbox.put(
            Joined(
                self.address, answer.shard_index, answer.num_shards, answer.num_fragments, answer.manifest_digest,
                policy, session.epoch, statuses,
            )
        )  # fmt: skip
        self._c.log.event("joined", shard=self.address, index=session.shard_index, generation=session.generation)

    async def _attend(self) -> None:
        """Hold the control stream until it breaks. Raises what broke it."""
        call = self._control.Attend(metadata=self.session.metadata())
        reporting: asyncio.Task[None] | None = None
        try:
            while True:
                async with asyncio.timeout(self._silence_s()):  # wait_for can swallow a cancellation before 3.12
                    message = await call.read()
                if message is rpc.EOF:
                    return
                if reporting is None:
                    # Not sooner: where the shard refuses while a report is being sent, grpc.aio drops the refusal and
                    # raises INTERNAL (grpc/grpc#36066). The shard speaks first, so this costs nothing.
                    reporting = asyncio.create_task(self._report(call), name=f"report {self.address}")
                    self._connected()
                directive = protobuf.directive_from_pb(message)
                if directive is not None:
                    self._hear(directive)
        except grpc.aio.AioRpcError as error:
            raise rpc.refusal_of(error) or error from None
        finally:
            if reporting is not None:
                reporting.cancel()
            call.cancel()

    async def _report(self, call: grpc.aio.StreamStreamCall) -> None:
        """Send progress after inner steps, and as a heartbeat when there is none."""
        try:
            while True:
                self._stepped.clear()  # first: a step that ends meanwhile is reported next time
                await call.write(protobuf.progress_to_pb(self._c.progress()))
                await asyncio.sleep(REPORT_EVERY_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.session.heartbeat_s - REPORT_EVERY_S):
                        await self._stepped.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same and says why

    def _hear(self, directive: Directive) -> None:
        match directive:
            case Collect():
                self._c.inbox.put(Asked(directive, self.session.epoch))
            case Committed():
                self._puller.announce(directive.fragment_id, directive.epoch, directive.version)
            case Pulse():
                self.pulse = directive
            case Stop():
                assert self.session.shard_index is not None
                self._c.inbox.put(Stopped(self.session.shard_index))
            case Drain():
                self._c.log.event("shard is shutting down", shard=self.address)
            case Evicted():
                raise rpc.refusal_from(directive.code, directive.message)

    # ------------------------------------------------------------ helpers

    def _dial(self, options: list[tuple[str, int]]) -> pb_grpc.ParameterServerStub:
        channel = grpc.aio.insecure_channel(self.address, options=options)
        self._channels.append(channel)
        return pb_grpc.ParameterServerStub(channel)  # type: ignore[no-untyped-call]

    def _is_announced(self, fragment_id: int) -> bool:
        return self._puller.is_announced(fragment_id)

    def _connected(self) -> None:
        self.connected = True
        self.connections += 1
        self._c.connected.add(self.address)
        self._c.metrics.exchange.connected(len(self._c.connected))
        if self.connections > 1:
            self._c.metrics.exchange.reconnected()

    def _disconnected(self) -> None:
        self.connected = False
        self._c.connected.discard(self.address)
        self._c.metrics.exchange.connected(len(self._c.connected))

    def _silence_s(self) -> float:
        return SILENCE_HEARTBEATS * self.session.heartbeat_s
