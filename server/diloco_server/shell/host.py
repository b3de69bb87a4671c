"""The host of one core `Shard`. It reports calls to the shard, and decides when the shard ticks.

The core runs in the event loop. `Service` checks calls, `EffectDriver` turns effects into versions, and `VersionWork`
has the thread and the disk for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial

from diloco_common import ports
from diloco_common.codec import Chunk, Payload
from diloco_common.errors import BadRequest, Busy, Refusal, Superseded
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.ports import Clock, World
from diloco_common.settings import Settings
from diloco_common.trust.identity import Identity
from diloco_common.wire.follower import Follower
from diloco_common.wire.manifest import TensorSpec
from diloco_common.wire.messages import (
    Drain,
    Evicted,
    FollowRequest,
    JoinAnswer,
    JoinRequest,
    Progress,
    PushAnswer,
    PushHeader,
    Stop,
)
from diloco_server.core.admission import PART
from diloco_server.core.membership import Member
from diloco_server.core.merge import PieceNorms
from diloco_server.core.parts import places_of
from diloco_server.core.shard import MirroredShard, Shard
from diloco_server.shell.driver import EffectDriver
from diloco_server.shell.keeper import recover
from diloco_server.shell.streams import LearnerStream, Reader
from diloco_server.shell.telemetry import ShardTelemetry
from diloco_server.shell.work import VersionWork
from diloco_server.storage.store import Store

TICK_S = 0.02
"""The resolution of grace windows and leases."""


class ShardHost:
    """Runs one shard. Create and use it inside one event loop; call `run` as a task."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        world: World,
        *,
        metrics: ShardMetrics,
        log: Log,
        history: ports.History | None = None,
        clock: Clock | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        """`clock`: seconds, for leases and grace windows; None: the world's clock, while this process is awake.

        `tick_s`: the seconds between ticks.
        """
        self.settings = settings
        self.shard = (MirroredShard if settings.shard.mirror_of else Shard)(settings, store.epoch)
        self.clock: Clock = clock or AwakeClock(settings.lease.heartbeat_s, world.clock)
        self.stopwatch = world.clock
        self.started_at = self.clock()
        self.metrics, self.log = metrics, log
        self.telemetry = ShardTelemetry(self.shard, metrics, log, history)
        self.work = VersionWork(self.shard, store, world, self.clock, metrics, log, self.advance)
        self.streams, self.readers, self.keeper = self.work.streams, self.work.readers, self.work.keeper
        self.driver = EffectDriver(self.shard, self.work, self.telemetry)
        self.driver.tell_readers = self.readers.tell
        self.driver.is_mirrored = lambda: self.readers.has_mirrors
        self.store = store
        self.keeps_files = store.keeps_files
        self._tick_s = tick_s
        self._cpu_clock = world.cpu_clock
        self._recovering = False
        self.replaced: Superseded | None = None
        self.follower: Follower | None = None
        """In a mirror: receives its versions."""
        self._later: asyncio.TimerHandle | None = None  # the next decision, if one is scheduled
        self._decision_s = 0.0  # how long the last decision took
        metrics.registry.before_scrape = self._sample

    # ------------------------------------------------------------ from start to end

    async def recover(self) -> None:
        """Restore the stored versions. Call it before serving. Raises DataError and OSError."""
        self._recovering, began = True, self.stopwatch()
        work = partial(recover, self.store, self.settings, self.driver.rules_of, self.log)
        recovered = await asyncio.get_running_loop().run_in_executor(self.work.thread, work)
        self._recovering = False
        if recovered is None:
            return
        manifest, fragments = recovered
        self.shard.versions.restore(manifest, fragments)
        versions = {restored.record.fragment_id: restored.record.version for restored in fragments}
        for fragment_id in versions:
            self.telemetry.restored(fragment_id)
        self.work.checkpointer.begin(versions, manifest)
        self.telemetry.recovered(took_s=self.stopwatch() - began)

    async def run(self) -> None:
        """Tick until cancelled. An error ends the shard, because without ticks no lease would end."""
        try:
            await self._let_time_pass()
        except Exception as error:
            self.log.error("time has stopped for the shard", trace=error)
            self.work.end(f"time has stopped for the shard: {error!r}")

    async def _let_time_pass(self) -> None:
        next_pulse = self.clock()
        while True:
            now = self.clock()
            if now >= next_pulse:
                self.shard.send_pulses()
                next_pulse = now + self.settings.lease.heartbeat_s
            self.advance()
            await asyncio.sleep(self._tick_s)

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, and finish open rounds and merges.

        `run` continues meanwhile. Gives up after `timeout_s` seconds; learners push again all work that was not merged.
        """
        self.log.event("draining", open_rounds=self.shard.open_rounds, open_merges=len(self.work))
        self.shard.drain()
        self.advance()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # not `clock`: the process is killed in real time
                await self.work.until(lambda: not self.work and not (self.shard.open_rounds and self.streams))

    def close(self) -> None:
        """End all streams and unfinished work.

        A version that is still being made is not announced; learners push its contributions again.
        """
        if self._later is not None:
            self._later.cancel()
        self.work.close()

    def ready(self) -> tuple[bool, str]:
        if self._recovering:
            return False, "recovering"
        if self.shard.draining:
            return False, "draining"
        if self.work.broken.is_set():
            return False, self.work.why_broken
        if self.keeper.failing:
            return False, f"storage: {self.keeper.failing}"
        if self.follower is not None and not self.shard.versions.all_seeded:
            return False, f"waiting for the versions of {self.settings.shard.mirror_of}"
        return True, "serving"

    def _sample(self) -> None:
        self.telemetry.sample(self.clock(), is_ready=self.ready()[0])
        self.metrics.storage.not_durable.set(self.keeper.not_durable)
        self.metrics.storage.saved_bytes.follow(self.keeper.bytes_saved)

    # ------------------------------------------------------------ when the core decides

    def advance(self) -> None:
        """Let the core decide, and carry out its effects. Call it after every event."""
        began = self.stopwatch()
        self.shard.tick(self.clock())
        self._decision_s = self.stopwatch() - began
        self.driver.carry_out_all()
        self.work.moved()

    def advance_later(self) -> None:
        """Advance soon, once for all events until then. For frequent events, such as reports.

        A decision visits every learner and fragment, so the cost of one per event would grow with the square of the
        learners. Waiting four times as long as the last decision took leaves decisions at most 20 % of a core.
        """
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(4 * self._decision_s, self._advance_now)

    def _advance_now(self) -> None:
        self._later = None
        self.advance()

    # ------------------------------------------------------------ leases

    def observe(self, tensors: Sequence[TensorSpec]) -> JoinAnswer:
        """The answer to an observer's Join. Raises NotSeeded or ManifestMismatch."""
        self.shard.observe(tensors)
        assert self.shard.manifest is not None
        return self.shard.join_answer(tensors=self.shard.manifest.tensors)

    def join(self, caller: Identity, request: JoinRequest) -> JoinAnswer:
        """Grant a lease. Raises Draining, ManifestMismatch, FrozenMismatch, Superseded or Busy."""
        member = self.shard.join(caller.learner_id, request, self.clock())
        with self.telemetry.called_by(caller):
            self.advance()
        return self.shard.join_answer(
            member.learner_id, member.generation, index=member.index, rules=self.driver.rules.words
        )

    def member(self, caller: Identity) -> Member:
        """The member that calls. Raises NotJoined, StaleGeneration, Superseded or LeaseExpired."""
        return self.shard.check(caller.learner_id, caller.generation, caller.epoch)

    def attend(self, caller: Identity) -> LearnerStream:
        """Open the control stream of a lease, and end an older one of the learner. Raises what `member` raises."""
        member = self.member(caller)
        stream = self.streams.open(member.learner_id, member.generation)
        self.shard.attend(member)
        self.advance()
        return stream

    def close_stream(self, stream: LearnerStream) -> None:
        self.streams.close(stream)
        self.work.moved()

    def progress(self, caller: Identity, progress: Progress) -> None:
        """Take a report, which renews the lease. Raises what `member` raises."""
        self.shard.progress(self.member(caller), progress, self.clock())
        self.advance_later()

    def follow(self, reader: Reader) -> None:
        reader.stream.send(self.shard.pulse())
        for state in self.shard.fragments.values():
            if state.seeded:
                reader.stream.send(state.announcement())
        if self.shard.done:
            reader.stream.send(Stop())
        if self.shard.draining:
            reader.stream.send(Drain())

    async def supersede(self, request: FollowRequest) -> Evicted:
        """Another process claims to be this shard, in another epoch. The later epoch wins. Returns the caller's
        eviction.

        Raises Superseded if this process must end, BadRequest if the caller is this process, and Busy as long as the
        folder cannot be marked.
        """
        mine = self.shard.epoch
        if request.epoch == mine:
            raise BadRequest("the caller is this shard itself")
        if request.epoch < mine:
            return Evicted(Superseded.code, f"this shard is in epoch {mine} here, which is later than {request.epoch}")
        lost = max(0, self.shard.tokens_merged - request.tokens_merged)
        try:
            await self.keeper.read(partial(self.store.supersede, request.epoch))
        except OSError as error:  # while its disk takes no writes, it announces nothing either
            raise Busy(f"the folder cannot be marked as replaced: {error}; the promoted one calls again") from error
        words = (
            f"a standby of shard {self.settings.shard.index} was promoted, and serves in epoch {request.epoch}; the "
            f"one of epoch {mine} ends, and {lost} tokens that it has merged since are lost"
        )
        raise self.end_as_replaced(words)

    def end_as_replaced(self, why: str) -> Superseded:
        self.log.error("replaced", code=Superseded.code, why=why)
        self.replaced = Superseded(why)
        self.work.end(why)
        return self.replaced

    def leave(self, caller: Identity) -> None:
        """End a learner's lease and its stream. Calls after the first do nothing."""
        current = self.shard.membership.get(caller.learner_id)
        if current is None or not current.live or current.generation != caller.generation:
            return
        self.shard.leave(self.member(caller))
        self.streams.end(caller.learner_id)
        with self.telemetry.called_by(caller):
            self.advance()

    def revoke(self, caller: Identity) -> None:
        """End a revoked learner's lease, and fence off its contributions to open rounds."""
        current = self.shard.membership.get(caller.learner_id)
        if current is not None and current.live and current.generation == caller.generation:
            self.shard.revoke(current)
            self.advance()

    # ------------------------------------------------------------ contributions

    def admit(self, member: Member, header: PushHeader) -> PushAnswer | None:
        """Decide on a push by its header alone. Returns its answer, or None if its bytes are wanted."""
        answer = self.shard.taking.admit(member, header, self.clock())
        return None if answer is None else self._answered(member, header, answer)

    def norms_of(self, header: PushHeader) -> PieceNorms:
        """The norms of an admitted push. Pass its chunks to `inspect` as they arrive."""
        pieces = self.shard.versions.owned(header.fragment_id).fragment.pieces
        return PieceNorms(header.payload, len(pieces), places_of(header.ranges, pieces))

    def inspect(self, norms: PieceNorms, chunk: Chunk) -> None:
        """Check the next chunk, in the event loop: this takes a fraction of the time that receiving it takes."""
        began = self._cpu_clock()
        norms.add(chunk)
        self.metrics.rounds.computed("inspect", self._cpu_clock() - began)

    def contribute(
        self, caller: Identity, header: PushHeader, payload: Payload, norms: tuple[float, ...]
    ) -> PushAnswer:
        """Take a push whose bytes are complete. Raises Draining if the shard has ended.

        Also raises what `member` raises, since the lease may have ended meanwhile.
        """
        self.work.check_open()
        member = self.member(caller)
        answer = self.shard.taking.contribute(member, header, payload, norms, self.clock())
        return self._answered(member, header, answer)

    def reject(self, member: Member, header: PushHeader, refusal: Refusal) -> PushAnswer:
        return self._answered(member, header, self.shard.taking.reject(member, header, refusal))

    def _answered(self, member: Member, header: PushHeader, answer: PushAnswer) -> PushAnswer:
        if answer.code != PART:
            self.telemetry.answered(member, header, answer)
        self.driver.carry_out_all()  # count it now; decide soon
        self.advance_later()
        return answer


class AwakeClock:
    """A monotonic clock that counts only the seconds during which the process was awake.

    A process may be frozen for longer than a lease (SIGSTOP, a suspended machine). When it wakes, it may check the time
    before it reads its learners' messages, and a plain clock would make all of them look silent.

    A gap between two calls counts as at most `longest_s`; the shard calls this many times a second.
    """

    def __init__(self, longest_s: float, clock: Clock) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._asked_at = clock()
        self._asleep_s = 0.0

    def __call__(self) -> float:
        now = self._clock()
        asleep_s, self._asked_at = now - self._asked_at - self._longest_s, now
        if asleep_s > 0:
            self._asleep_s += asleep_s
        return now - self._asleep_s
