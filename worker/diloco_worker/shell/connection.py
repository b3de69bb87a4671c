"""The connection of a learner to one shard: join, attend, report, listen, and reconnect.

It runs inside an event loop, with its own pushes (pusher.py) and pulls (puller.py). core/connection.py decides when to
dial again, and core/agreement.py which objections of shards end the learner. After any other error the shard counts as
away and is dialed again. Training does not notice control streams: it only reads the inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from diloco_common.codec import offered_names
from diloco_common.errors import DilocoError, Refusal, Unavailable, refusal_from
from diloco_common.observe.logs import Log
from diloco_common.ports import ControlStream
from diloco_common.wire.calls import CALL_S, HURRY_S, JOIN_WITHIN_S, REPORT_EVERY_S, SILENCE_HEARTBEATS
from diloco_common.wire.manifest import Manifest
from diloco_common.wire.messages import (
    PROTOCOL,
    Collect,
    Committed,
    Directive,
    Drain,
    Evicted,
    Held,
    JoinAnswer,
    JoinRequest,
    Progress,
    Pulse,
    ShardAway,
    Stop,
    check_no_way_back,
)
from diloco_worker.core.agreement import Agreement, Objections
from diloco_worker.core.connection import GONE_S, ConnectionState, Dialing
from diloco_worker.core.events import Asked, Failed, Fetch, FetchEnded, Joined, Stopped
from diloco_worker.core.fragment import Lease
from diloco_worker.shell.codec_thread import ConnectionContext
from diloco_worker.shell.puller import Puller
from diloco_worker.shell.pusher import Pusher

GOODBYE_S = 2 * HURRY_S


class Connection:
    """One learner's connection to one shard, with its pushes and pulls."""

    def __init__(
        self,
        address: str,
        progress: Progress,
        context: ConnectionContext,
        agreement: Agreement,
        objections: Objections,
        others: Sequence[Connection],
    ) -> None:
        """All connections share `agreement` and `objections`; `others` are all of them."""
        self.state = ConnectionState(context.caller, address, context.council.to_pull())
        self.is_up = False
        """Whether the shard answers on the control stream."""
        self.times_up = 0
        self._c = context
        self._transport = context.dial(address)
        self.pusher = Pusher(self.state, self._transport, context)
        self.puller = Puller(self.state, self._transport, context)
        self._dialing = Dialing()
        self._is_leaving = False
        self._progress = progress
        self._last_rounds: frozenset[int] | None = None  # None: the learner is not leaving
        self._has_progress = asyncio.Event()
        self._down_since: float | None = context.world.clock()
        self._fault: DilocoError | None = None  # an error found elsewhere, which ends the control stream
        self._deadline: asyncio.Timeout | None = None  # for the next message on the control stream
        self.why_down: DilocoError | None = None
        """The error of the last attempt; None: the shard is up, was not dialed yet, or ended the stream itself."""
        self._others = others
        self.agreement, self.objections = agreement, objections
        self.pusher.refused = self.puller.failed = self._fails

    @property
    def address(self) -> str:
        return self.state.address

    @property
    def _is_spoken_for(self) -> bool:
        """Whether the leader joins, attends and says goodbye for this process."""
        return self._c.caller.rank > 0

    @property
    def away(self) -> ShardAway | None:
        """The report to the other shards if this one is away; None: it is up."""
        if self._down_since is None:
            return None
        return ShardAway(self.address, self.state.shard_index, self._c.world.clock() - self._down_since)

    @property
    def is_gone(self) -> bool:
        """Whether nobody has listened there for so long that it is not just restarting."""
        since = self._dialing.refused_since
        return since is not None and self._c.world.clock() - since >= GONE_S

    async def run(self) -> None:
        pulling = asyncio.create_task(self.puller.run(), name=f"pull {self.address}")
        attending = asyncio.create_task(self._stay_connected(), name=f"attend {self.address}")
        log = self._c.telemetry.log
        try:
            ended, _ = await asyncio.wait((pulling, attending), return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        except asyncio.CancelledError:
            await self._end(pulling, attending)
            raise
        except DilocoError as refusal:
            log.error("refused", shard=self.address, code=refusal.code, why=refusal)
            self._c.inbox.put(Failed(refusal))
        except Exception as error:  # a bug of ours: report it, or the learner would hear nothing more
            log.error("connection failed", trace=error, shard=self.address)
            self._c.inbox.put(Failed(DilocoError(f"the connection to {self.address} failed: {error!r}")))
        await self._end(pulling, attending)  # not in a `finally`: a coroutine being closed cannot await

    def model_is_cut(self, manifest: Manifest) -> None:
        self.state.manifest = manifest
        self.puller.wake()

    def take_lease(self, joined: Joined) -> None:
        """The leader has joined; other ranks call under its lease."""
        if self._is_spoken_for:
            self._take_lease(joined)
            self.is_up = True
        self.puller.wake()

    def fetch(self, fetch: Fetch) -> None:
        """All ranks should pull this version."""
        self.state.to_pull.fetch(fetch.fragment_id, (fetch.epoch, fetch.version))
        self.puller.wake()

    def fetch_ended(self, ended: FetchEnded) -> None:
        fetch = ended.fetch
        self.state.to_pull.ended(fetch.fragment_id, (fetch.epoch, fetch.version), is_applied=ended.is_applied)
        self.puller.wake()

    def report(self, progress: Progress) -> None:
        self._progress = progress
        self._has_progress.set()

    def ask_last_rounds(self, fragment_ids: frozenset[int]) -> None:
        """Tell the shard soon that the learner leaves, and for which of these fragments it asks for a round."""
        if (mine := fragment_ids & self.state.owned) != self._last_rounds:
            self._last_rounds = mine
            self._has_progress.set()

    async def settle(self, timeout_s: float) -> None:
        """Wait for answers to the pushes in flight."""
        if self.is_up:
            await self.pusher.settle(timeout_s)

    async def leave(self, at_most_s: float) -> None:
        """Send Leave if the shard is up, unless the leader does it."""
        self._is_leaving = True
        if self.is_up and not self._is_spoken_for:
            try:
                await self._transport.leave(self.state.identity, min(GOODBYE_S, at_most_s))
            except (Refusal, Unavailable) as error:
                self._c.telemetry.log.debug("goodbye not heard", shard=self.address, why=error)

    async def _end(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.pusher.cancel()
        await self.puller.close()
        await self._transport.close(GOODBYE_S)  # the stream may end before Leave is answered

    # ------------------------------------------------------------ control

    async def _stay_connected(self) -> None:
        """Join and attend, repeatedly. Raises the error on which enough shards agree."""
        if self._is_spoken_for:
            await asyncio.get_running_loop().create_future()
        world, telemetry = self._c.world, self._c.telemetry
        while True:
            self._dialing.begin(world.clock(), has_lease=self.state.has_lease)
            error: DilocoError | None = None
            try:
                if not self.state.has_lease:
                    await self._join()
                await self._attend()
            except DilocoError as caught:
                error = caught
            except Exception as caught:  # caused by the shard's messages or a bug of ours; other connections go on
                telemetry.log.error("connection failed", trace=caught, shard=self.address)
                error = DilocoError(f"the connection to {self.address} failed: {caught!r}")
            finally:
                if self.is_up:
                    self.is_up, self._down_since = False, world.clock()
                telemetry.disconnected(self.address)
            self.why_down = error
            redial = self._dialing.ended(error, world.clock(), world.random.random())
            is_objection = redial.is_objection or error is self._fault
            if (
                error is not None
                and is_objection
                and self.objections.raised(self.address, error, sum(one.is_gone for one in self._others))
            ):
                raise error
            if redial.is_lease_over:
                self.state.lost_lease()
            if self._is_leaving:
                return
            if redial.is_news:
                code = None if error is None else error.code
                telemetry.log.warning("no connection, trying again", shard=self.address, code=code, why=redial.why)
            await asyncio.sleep(redial.after_s)

    async def _join(self) -> None:
        """Get a lease. Raises a Refusal or Unavailable."""
        answer = await self._ask_for_lease()
        check_no_way_back(answer, self.state.epoch)
        joined = Joined.at(self.address, answer)
        try:
            self.agreement.take(joined)
        except DilocoError:  # the shard does not fit the run: its rounds need not wait for this learner
            with contextlib.suppress(Refusal, Unavailable):
                lease = Lease(answer.epoch, answer.generation)
                await self._transport.leave(self._c.caller.under(lease), GOODBYE_S)
            raise
        _say_what_is_lost(joined, self._c.codec.held(self.state.fragment_ids), self._c.telemetry.log)
        self._take_lease(joined)
        self._c.inbox.put(joined)
        self._c.telemetry.log.event(
            "joined", shard=self.address, index=answer.shard_index, generation=answer.generation
        )

    async def _ask_for_lease(self) -> JoinAnswer:
        """Join, and again if that took long: the time on the way makes this process seem younger than it is, and its
        age decides between two processes with the same id."""
        state, clock = self.state, self._c.world.clock
        for _ in range(2):
            asked = clock()
            request = JoinRequest(
                PROTOCOL, self._c.caller.process_id, self._c.tensors, offered_names(),
                held=self._c.codec.held(state.fragment_ids), frozen=self._c.frozen,
                ties=self._c.ties, index=self._c.index if state.index is None else state.index,
                age_s=asked - self._c.caller.born, tokens_seen=self._c.codec.tokens_seen(state.fragment_ids),
                site=self._c.site,
            )  # fmt: skip
            answer = await self._transport.join(self._c.caller.identity, request, CALL_S)
            if clock() - asked <= JOIN_WITHIN_S:  # most take milliseconds
                break
        return answer

    def _take_lease(self, joined: Joined) -> None:
        mine = self.state.fragment_ids
        if self.state.take_lease(joined):
            self._c.codec.drop(lambda c: c.fragment_id in mine and c.shard_epoch != joined.epoch)

    def _fails(self, error: DilocoError) -> None:
        """The shard did something wrong outside the control stream: end that stream, and get a new lease."""
        self._fault = error
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time())

    async def _attend(self) -> None:
        """Hold the control stream until it ends. Raises the Refusal or Unavailable that ended it."""
        self._fault = None
        stream = self._transport.attend(self.state.identity)
        reporting: asyncio.Task[None] | None = None
        silence_s = SILENCE_HEARTBEATS * self.state.heartbeat_s
        try:
            while True:
                async with asyncio.timeout(silence_s) as self._deadline:  # wait_for can swallow a cancellation
                    directive = await stream.hear()
                self._deadline = None
                if self._fault is not None:
                    raise self._fault
                if directive is None:
                    return
                if reporting is None:
                    # Not sooner: if the shard refuses while a report is being sent, grpc.aio drops the refusal and
                    # raises INTERNAL (grpc/grpc#36066). The shard speaks first, so this costs nothing.
                    reporting = asyncio.create_task(self._report_all(stream), name=f"report {self.address}")
                    self._came_up()
                self._hear(directive)
        except TimeoutError:
            if self._fault is not None:
                self.state.lost_lease()
                raise self._fault from None
            raise Unavailable(f"silent for {silence_s:.1f} s") from None
        finally:
            self._deadline = None
            if reporting is not None:
                reporting.cancel()
            stream.cancel()

    async def _report_all(self, stream: ControlStream) -> None:
        """Send progress after inner steps, and otherwise as a heartbeat."""
        with contextlib.suppress(Unavailable):  # the reader gets the same error and reports it
            while True:
                self._has_progress.clear()  # first: a step that ends meanwhile is reported next time
                failing = self.pusher.failing
                said = replace(
                    self._progress, away=tuple(away for one in self._others if (away := one.away) is not None),
                    last_rounds=self._last_rounds, pushes_fail_why=failing.why, pushes_fail_s=failing.for_s,
                )  # fmt: skip
                await stream.report(said)
                self.pusher.say_what_fails()
                await asyncio.sleep(REPORT_EVERY_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.state.heartbeat_s - REPORT_EVERY_S):
                        await self._has_progress.wait()

    def _hear(self, directive: Directive) -> None:
        match directive:
            case Collect():
                self.state.check_owned(directive.fragment_id)
                self._c.inbox.put(Asked(directive, self.state.epoch))
            case Committed():
                self.state.announced(directive.fragment_id, (directive.epoch, directive.version))
                self.puller.near[directive.fragment_id] = directive.near
                self.puller.wake()
            case Pulse():
                self.state.pulse = directive
            case Stop():
                assert self.state.shard_index is not None
                self._c.inbox.put(Stopped(self.state.shard_index))
            case Drain():
                self._c.telemetry.log.event("shard is shutting down", shard=self.address)
            case Evicted():
                raise refusal_from(directive.code, directive.message)

    def _came_up(self) -> None:
        self.is_up, self._down_since = True, None
        self.pusher.begin_anew()
        self.times_up += 1
        self.why_down = None
        self._dialing.is_up()
        self.objections.withdrawn(self.address)
        self.puller.wake()
        self._c.telemetry.connected(self.address, self.times_up)


def _say_what_is_lost(joined: Joined, seen: Sequence[Held], log: Log) -> None:
    """Log if the shard has lost versions that this learner has seen."""
    now = {status.fragment_id: status for status in joined.fragments}
    held = [h for h in seen if h.fragment_id in now]
    if lost := [h for h in held if h.version and not now[h.fragment_id].seeded]:
        log.warning(
            "the shard has lost its versions: this learner brings what it has", code="VERSIONS_LOST",
            shard=joined.address, fragments=len(lost), version=max(h.version for h in lost),
        )  # fmt: skip
    if older := [h for h in held if now[h.fragment_id].seeded and now[h.fragment_id].version < h.version]:
        log.warning(
            "the shard continues from older versions than this learner has seen: what was merged since is lost",
            code="VERSIONS_LOST", shard=joined.address, fragments=len(older),
            version=min(now[h.fragment_id].version for h in older), seen=max(h.version for h in older),
        )  # fmt: skip
