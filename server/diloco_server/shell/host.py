"""The host of one core `Shard`: its only caller, and the one that decides when it ticks.

The core runs in the event loop. Arithmetic on whole fragments (seeds, merges, encodings) runs on one compute thread,
because two OpenMP teams on the same cores are slower than one. `Keeper` writes versions on its own threads. `Service`
checks calls, and `EffectDriver` turns effects into versions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from diloco_common import ports
from diloco_common.codec import Chunk, Payload
from diloco_common.errors import BadRequest, Busy, Draining, Refusal, Superseded
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics import ComputePhase, ShardMetrics
from diloco_common.ports import Clock, World
from diloco_common.settings import Settings
from diloco_common.trust.identity import Identity
from diloco_common.wire.follower import Follower
from diloco_common.wire.manifest import Manifest, TensorSpec
from diloco_common.wire.messages import (
    Committed,
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
from diloco_server.core.effects import MergeRound, Tell
from diloco_server.core.membership import Member
from diloco_server.core.merge import PieceNorms
from diloco_server.core.parts import places_of
from diloco_server.core.shard import MirroredShard, Shard
from diloco_server.shell.control_streams import ControlStreams, LearnerStream
from diloco_server.shell.driver import EffectDriver, Job
from diloco_server.shell.keeper import Checkpointer, Keeper, recover
from diloco_server.shell.readers import Reader, Readers
from diloco_server.shell.telemetry import ShardTelemetry
from diloco_server.storage.store import Store
from diloco_server.storage.version_file import StoredVersion

TICK_S = 0.02
"""The resolution of grace windows and leases."""

T = TypeVar("T")


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
        """`clock`: seconds, for leases and grace windows; None: the world's, while this process is awake.

        `tick_s`: interval of ticks.
        """
        self.settings = settings
        self.shard = (MirroredShard if settings.shard.mirror_of else Shard)(settings, store.epoch)
        self.clock: Clock = clock or AwakeClock(settings.lease.heartbeat_s, world.clock)
        self.stopwatch = world.clock
        self.started_at = self.clock()
        self.metrics, self.log = metrics, log
        self.telemetry = ShardTelemetry(self.shard, metrics, log, history)
        self.driver = EffectDriver(self.shard, self, self.telemetry)
        self.streams, self.readers = ControlStreams(), Readers()
        self.driver.tell_readers = self.readers.tell
        self.driver.is_mirrored = lambda: self.readers.has_mirrors
        self._checkpointer = Checkpointer(settings, world, metrics, log)
        self.keeper = Keeper(store, world, metrics, log, self._written)
        self.store = store
        self.keeps_files = store.keeps_files
        self._tick_s = tick_s
        self._compute = world.threads(1, "diloco-compute")
        self._cpu_clock = world.cpu_clock
        self._give_back = world.give_back
        self._computed_last: ComputePhase | None = None  # owned by the compute thread
        self._recovering = False
        self._jobs: dict[asyncio.Task[None], None] = {}
        # Not a set: `close` cancels them in the order of their start, the same in every run of a seed.
        self.broken = asyncio.Event()
        """Set when this process must end: ticks stopped, or a merge failed halfway and left values of no version."""
        self.why_broken = ""
        self.replaced: Superseded | None = None
        self.follower: Follower | None = None
        """In a mirror: receives its versions."""
        self.closed = False
        self._later: asyncio.TimerHandle | None = None  # the next decision, if one is scheduled
        self._decision_s = 0.0  # how long the last decision took
        self._moved = asyncio.Event()  # set when a condition of `until` may have changed
        metrics.registry.before_scrape = self._sample

    # ------------------------------------------------------------ from start to end

    async def recover(self) -> None:
        """Restore the stored versions. Call it before serving. Raises DataError and OSError."""
        self._recovering, began = True, self.stopwatch()
        work = partial(recover, self.store, self.settings, self.driver.making, self.log)
        recovered = await asyncio.get_running_loop().run_in_executor(self._compute, work)
        self._recovering = False
        if recovered is None:
            return
        manifest, fragments = recovered
        self.shard.versions.restore(manifest, fragments)
        versions = {restored.record.fragment_id: restored.record.version for restored in fragments}
        for fragment_id in versions:
            self.telemetry.restored(fragment_id)
        self._checkpointer.begin(versions, manifest)
        self.telemetry.recovered(took_s=self.stopwatch() - began)

    async def run(self) -> None:
        """Tick until cancelled. An error ends the shard, because without ticks no lease would end."""
        try:
            await self._let_time_pass()
        except Exception as error:
            self.log.error("time has stopped for the shard", trace=error)
            self._break(f"time has stopped for the shard: {error!r}")

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

        `run` continues meanwhile. Gives up after `timeout_s` seconds; learners push again whatever was not merged.
        """
        self.log.event("draining", open_rounds=self.shard.open_rounds, open_merges=len(self._jobs))
        self.shard.drain()
        self.advance()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # not `clock`: the process is killed in real time
                await self.until(lambda: not self._jobs and not (self.shard.open_rounds and self.streams))

    def close(self) -> None:
        """End all control streams, the compute thread, and unfinished work.

        A version that is still being made is not announced; its contributions are pushed again.
        """
        self.closed = True
        if self._later is not None:
            self._later.cancel()
        for job in self._jobs:
            job.cancel()
        self.streams.end_all()
        self.readers.end_all()
        self._compute.shutdown(wait=False, cancel_futures=True)
        self.keeper.close()
        self._checkpointer.close()
        self._moved.set()

    async def writes_ended(self, timeout_s: float) -> bool:
        """After `close`: wait until no thread writes to the data folder. False if one still does after `timeout_s`."""
        ended = await asyncio.gather(self.keeper.ended(timeout_s), self._checkpointer.ended(timeout_s))
        return all(ended)

    def ready(self) -> tuple[bool, str]:
        if self._recovering:
            return False, "recovering"
        if self.shard.draining:
            return False, "draining"
        if self.broken.is_set():
            return False, self.why_broken
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
        self._moved.set()

    def advance_later(self) -> None:
        """Advance soon, once for all events until then. For frequent events, such as reports.

        A decision visits every learner and fragment, so one per event would cost the square of the learners. Waiting
        four times as long as the last one took leaves decisions at most 20 % of a core.
        """
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(4 * self._decision_s, self._advance_now)

    def _advance_now(self) -> None:
        self._later = None
        self.advance()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition that only this host's events change."""
        while not is_so():
            self._moved.clear()
            await self._moved.wait()

    # ------------------------------------------------------------ leases

    def observe(self, tensors: Sequence[TensorSpec]) -> JoinAnswer:
        """Raises NotSeeded or ManifestMismatch."""
        self.shard.observe(tensors)
        assert self.shard.manifest is not None
        return self.shard.join_answer(tensors=self.shard.manifest.tensors)

    def take_number(self, learner_id: str) -> JoinAnswer:
        """Keep a number for a learner that has no model yet. Raises Draining or Busy."""
        return self.shard.join_answer(index=self.shard.take_number(learner_id, self.clock()))

    def join(self, learner_id: str, request: JoinRequest) -> JoinAnswer:
        """Grant a lease. Raises Draining, ManifestMismatch, FrozenMismatch, Superseded or Busy."""
        member = self.shard.join(learner_id, request, self.clock())
        self.advance()
        return self.shard.join_answer(learner_id, member.generation, index=member.index, rules=self.driver.rules.words)

    def member(self, caller: Identity) -> Member:
        """The member that calls. Raises NotJoined, StaleGeneration, Superseded or LeaseExpired."""
        return self.shard.check(caller.learner_id, caller.generation, caller.epoch)

    def attend(self, caller: Identity) -> LearnerStream:
        """The control stream of a lease; ends an older one of the same learner. Raises as `member` does."""
        member = self.member(caller)
        stream = self.streams.open(member.learner_id, member.generation)
        self.shard.attend(member)
        self.advance()
        return stream

    def close_stream(self, stream: LearnerStream) -> None:
        self.streams.close(stream)
        self._moved.set()

    def progress(self, caller: Identity, progress: Progress) -> None:
        """Take a report, which renews the lease. Raises as `member` does."""
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

        Raises Superseded if this process must end, BadRequest if the caller is this process, and Busy while the folder
        cannot be marked.
        """
        mine = self.shard.epoch
        if request.epoch == mine:
            raise BadRequest("the caller is this shard itself")
        if request.epoch < mine:
            return Evicted(Superseded.code, f"this shard is in epoch {mine} here, which is later than {request.epoch}")
        lost = max(0, self.shard.tokens_merged - request.tokens_merged)
        try:
            await self.keeper.read(partial(self.store.supersede, request.epoch))
        except OSError as error:  # while its disk takes nothing, it announces nothing either
            raise Busy(f"the folder cannot be marked as replaced: {error}; the promoted one calls again") from error
        words = (
            f"a standby of shard {self.settings.shard.index} was promoted, and serves in epoch {request.epoch}; the "
            f"one of epoch {mine} ends, and {lost} tokens that it has merged since are lost"
        )
        raise self.end_as_replaced(words)

    def end_as_replaced(self, why: str) -> Superseded:
        self.log.error("replaced", code=Superseded.code, why=why)
        self.replaced = Superseded(why)
        self._break(why)
        return self.replaced

    def leave(self, caller: Identity) -> bool:
        """End a learner's lease and its stream. Returns whether it held one; calls after the first do nothing."""
        current = self.shard.membership.get(caller.learner_id)
        if current is None or not current.live or current.generation != caller.generation:
            return False
        self.shard.leave(self.member(caller))
        self.streams.end(caller.learner_id)
        self.advance()
        return True

    def revoke(self, caller: Identity) -> None:
        """End a revoked learner's lease, and fence off its contributions to open rounds."""
        current = self.shard.membership.get(caller.learner_id)
        if current is not None and current.live and current.generation == caller.generation:
            self.shard.revoke(current)
            self.advance()

    # ------------------------------------------------------------ contributions

    def admit(self, member: Member, header: PushHeader) -> PushAnswer | None:
        """Decide on a push by its header alone. Returns its answer, or None if its bytes are wanted."""
        answer = self.shard.admit(member, header)
        return None if answer is None else self._answered(member, header, answer)

    def norms_of(self, header: PushHeader) -> PieceNorms:
        """The norms of an admitted push. Pass its chunks to `inspect` as they arrive."""
        pieces = self.shard.owned(header.fragment_id).fragment.pieces
        return PieceNorms(header.payload, len(pieces), places_of(header.ranges, pieces))

    def inspect(self, norms: PieceNorms, chunk: Chunk) -> None:
        """Check the next chunk, in the event loop: it takes a fraction of the time to receive it."""
        began = self._cpu_clock()
        norms.add(chunk)
        self.metrics.rounds.computed("inspect", self._cpu_clock() - began)

    def contribute(
        self, caller: Identity, header: PushHeader, payload: Payload, norms: tuple[float, ...]
    ) -> PushAnswer:
        """Take a push whose bytes are complete. Raises Draining once the shard has ended.

        Raises as `member` does, since the lease may have ended meanwhile.
        """
        self._check_open()
        member = self.member(caller)
        answer = self.shard.contribute(member, header, payload, norms, self.clock())
        return self._answered(member, header, answer)

    def reject(self, member: Member, header: PushHeader, refusal: Refusal) -> PushAnswer:
        return self._answered(member, header, self.shard.reject(member, header, refusal))

    def _answered(self, member: Member, header: PushHeader, answer: PushAnswer) -> PushAnswer:
        if answer.code != PART:
            self.telemetry.answered(member, header, answer)
        self.driver.carry_out_all()  # count now, decide soon
        self.advance_later()
        return answer

    # ------------------------------------------------------------ the shell of its effects

    def tell(self, tell: Tell) -> None:
        self.streams.tell(tell)

    def start(self, job: Job, name: str) -> None:
        """Run a job, then advance. Does nothing once the shard has ended."""
        if self.closed:  # the last pushes closed a round
            return
        task = asyncio.create_task(self._run(job), name=name)
        self._jobs[task] = None
        task.add_done_callback(self._finished)

    async def _run(self, job: Job) -> None:
        await job()
        self.advance()

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._jobs[task]
        if not task.cancelled() and task.exception() is not None:
            self.log.error("job failed", trace=task.exception(), job=task.get_name())
        self._moved.set()

    async def compute(self, phase: ComputePhase, work: Callable[[], T]) -> T:
        """Run arithmetic on the compute thread, in the order of the calls. Raises Draining once the shard has ended."""
        self._check_open()

        def timed() -> T:
            if self._computed_last == "seed":  # its bytes are free, and contributions are smaller
                self._give_back()
            self._computed_last = phase
            began = self._cpu_clock()
            try:
                return work()
            finally:
                self.metrics.rounds.computed(phase, self._cpu_clock() - began)

        return await asyncio.get_running_loop().run_in_executor(self._compute, timed)

    def _check_open(self) -> None:
        if self.closed:
            raise Draining("this shard has ended; call again when it is back")

    def failed(self, merge: MergeRound, error: Exception) -> None:
        self._break(f"version {merge.version} of fragment {merge.fragment_id} cannot be made: {error}")

    def _break(self, why: str) -> None:
        """Make this process end. The first reason counts."""
        self.why_broken = self.why_broken or why
        self.broken.set()

    def _written(self, fragment_id: int, version: int, manifest: Manifest) -> None:
        self._checkpointer.written(fragment_id, version, manifest)
        self.readers.is_on_disk(Committed(fragment_id, version, self.shard.epoch))

    async def keep(self, version: StoredVersion) -> None:
        """Make a version durable. It may be announced once this returns.

        A standby that keeps pace has the version before by then. One that lags is waited for as long as a lease, and
        then no longer until it has caught up.
        """
        assert self.shard.manifest is not None
        await self.keeper.keep(version, self.shard.manifest)
        fragment_id, number = version.record.fragment_id, version.record.version
        began = self.stopwatch()
        try:
            async with asyncio.timeout(self.settings.lease.lease_s):
                await self.until(
                    lambda: self.closed or self.shard.draining or self.readers.copies.may_announce(fragment_id, number)
                )
        except TimeoutError:
            self.log.warning("the standby does not keep pace", fragment=fragment_id, version=number)
            self.readers.copies.falls_behind(fragment_id)
        if self.readers.has_standby:
            self.metrics.storage.standby_wait_seconds.observe(self.stopwatch() - began)

    def copied(self, fragment_id: int, version: int) -> None:
        self.readers.copied(fragment_id, version)
        self._moved.set()


class AwakeClock:
    """Monotonic seconds during which the process was awake.

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
