"""The host of one core `Shard`: the only one that calls it, and the one that decides when it goes on.

The core runs in the event loop, so it has one owner. Arithmetic on whole fragments (seeds, merges, encodings)
runs on one compute thread: two OpenMP teams on the same cores are slower than one. `Keeper` makes versions durable, on
threads of its own. What callers may do is the business of `Service`; how effects become versions, of `EffectDriver`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TypeVar

from diloco_common import ports
from diloco_common.codec import Chunk, Payload
from diloco_common.errors import BadRequest, Draining, Refusal, Superseded
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
from diloco_server.core.mirrored import MirroredShard
from diloco_server.core.parts import places_of
from diloco_server.core.shard import Shard
from diloco_server.shell.awake_clock import AwakeClock
from diloco_server.shell.control_streams import ControlStreams, LearnerStream
from diloco_server.shell.driver import EffectDriver, Job
from diloco_server.shell.keeper import Checkpointer, Keeper, recover
from diloco_server.shell.readers import Reader, Readers
from diloco_server.shell.telemetry import ShardTelemetry
from diloco_server.storage.store import Store
from diloco_server.storage.version_file import StoredVersion

TICK_S = 0.02
"""The resolution of grace windows and leases."""
DECISION_WAIT = 4.0
"""How long events wait for the next decision, in durations of the last one: so a fifth of a core decides, at most."""

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
        """`clock` measures leases and grace windows, in seconds; None: the world's, while this process is awake.

        `tick_s`: how often time passes for the core.
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
        self.keeper = Keeper(store, settings.shard, world, metrics, log, self._written)
        self.store = store
        self.keeps_files = store.keeps_files
        self._tick_s = tick_s
        self._compute = world.threads(1, "diloco-compute")
        self._cpu_clock = world.cpu_clock
        self._give_back = world.give_back
        self._computed_last: ComputePhase | None = None  # of the compute thread alone
        self._recovering = False
        self._jobs: dict[asyncio.Task[None], None] = {}
        # Not a set: it has no order, and `close` cancels them in the order of their start, in every run of a seed.
        self.broken = asyncio.Event()
        """Set when this process must end: a merge failed half way, so the values in memory are of no version; or time
        has stopped for the core."""
        self.why_broken = ""
        self.replaced: Superseded | None = None
        """Another process is this shard now."""
        self.follower: Follower | None = None
        """Of a mirror: what brings its versions."""
        self.closed = False
        self._later: asyncio.TimerHandle | None = None  # the decision that events wait for
        self._decision_s = 0.0  # how long the last decision took
        self._moved = asyncio.Event()  # set whenever something that `until` asks about may have changed
        metrics.registry.before_scrape = self._sample

    # ------------------------------------------------------------ from start to end

    async def recover(self) -> None:
        """Go on from what the store holds, before anybody is served. Raises DataError and OSError."""
        self._recovering, began = True, self.stopwatch()
        work = partial(recover, self.store, self.settings, self.driver.making, self.log)
        recovered = await asyncio.get_running_loop().run_in_executor(self._compute, work)
        self._recovering = False
        if recovered is None:
            return
        manifest, fragments = recovered
        self.shard.restore(manifest, fragments)
        versions = {restored.record.fragment_id: restored.record.version for restored in fragments}
        for fragment_id in versions:
            self.telemetry.restored(fragment_id)
            self.keeper.recovered(fragment_id)
        self._checkpointer.begin(versions, manifest)
        self.telemetry.recovered(took_s=self.stopwatch() - began)

    async def run(self) -> None:
        """Let time pass for the core until cancelled. An error ends the shard: without time, no lease would end."""
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
        """Take no new work, and finish what is under way: rounds that learners were asked for, and merges.

        `run` goes on meanwhile. After `timeout_s` seconds it is left: learners push again what was not merged.
        """
        self.log.event("draining", open_rounds=self.shard.open_rounds, open_merges=len(self._jobs))
        self.shard.drain()
        self.advance()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # not by `clock`: the process is about to be killed in real time
                await self.until(lambda: not self._jobs and not (self.shard.open_rounds and self.streams))
        await self.keeper.flush(timeout_s)

    def close(self) -> None:
        """End every control stream, the compute thread, and the work that a drain has left.

        A version that is still being made is not announced then: what goes into it is pushed again.
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
        """Whether learners are welcome, and why not."""
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
        """Let the core decide, and carry out what it asks for. After every event."""
        began = self.stopwatch()
        self.shard.tick(self.clock())
        self._decision_s = self.stopwatch() - began
        self.driver.carry_out_all()
        self._moved.set()

    def advance_later(self) -> None:
        """The same in a moment, once for all events until then: for events that come from every learner, all the time.

        A decision looks at every learner and fragment, so one per event would cost the square of the learners.
        """
        if self._later is None:
            wait_s = DECISION_WAIT * self._decision_s
            self._later = asyncio.get_running_loop().call_later(wait_s, self._advance_now)

    def _advance_now(self) -> None:
        self._later = None
        self.advance()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so that only this host's events change."""
        while not is_so():
            self._moved.clear()
            await self._moved.wait()

    # ------------------------------------------------------------ leases

    def observe(self, tensors: Sequence[TensorSpec]) -> JoinAnswer:
        """Describe the run to an observer. Raises NotSeeded or ManifestMismatch."""
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
        """Who calls, if it holds a lease. Raises NotJoined, StaleGeneration, Superseded, LeaseExpired or Stalled."""
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
        """A learner reports, which renews its lease. Raises as `member` does."""
        self.shard.progress(self.member(caller), progress, self.clock())
        self.advance_later()

    def follow(self, reader: Reader) -> None:
        """A reader's stream begins, with what there is."""
        reader.stream.send(self.shard.pulse())
        for state in self.shard.fragments.values():
            if state.seeded:
                reader.stream.send(state.announcement())
        if self.shard.done:
            reader.stream.send(Stop())
        if self.shard.draining:
            reader.stream.send(Drain())

    async def supersede(self, request: FollowRequest) -> Evicted:
        """Somebody says that he is this shard, in another epoch: the later one stays. Answers what ends him.

        Raises Superseded where it is this one that ends, and BadRequest where he is this one.
        """
        mine = self.shard.epoch
        if request.epoch == mine:
            raise BadRequest("this is that shard itself")
        if request.epoch < mine:
            return Evicted(Superseded.code, f"this shard is in epoch {mine} here, which is later than {request.epoch}")
        lost = max(0, self.shard.tokens_merged - request.tokens_merged)
        await self.keeper.read(partial(self.store.supersede, request.epoch))
        words = (
            f"a standby of shard {self.settings.shard.index} was promoted, and serves in epoch {request.epoch}; the "
            f"one of epoch {mine} ends, and {lost} tokens that it has merged since are lost"
        )
        raise self.end_as_replaced(words)

    def end_as_replaced(self, why: str) -> Superseded:
        """Another process is this shard: this one ends."""
        self.log.error("replaced", code=Superseded.code, why=why)
        self.replaced = Superseded(why)
        self._break(why)
        return self.replaced

    def leave(self, caller: Identity) -> bool:
        """A learner says goodbye: nothing more is told to it. Whether a lease ended. Repeating it is fine."""
        current = self.shard.membership.get(caller.learner_id)
        if current is None or not current.live or current.generation != caller.generation:
            return False
        self.shard.leave(self.member(caller))
        self.streams.end(caller.learner_id)
        self.advance()
        return True

    def revoke(self, caller: Identity) -> None:
        """A learner may call no longer: its lease ends, and what it contributed to open rounds is fenced off."""
        current = self.shard.membership.get(caller.learner_id)
        if current is not None and current.live and current.generation == caller.generation:
            self.shard.revoke(current)
            self.advance()

    # ------------------------------------------------------------ contributions

    def admit(self, member: Member, header: PushHeader) -> PushAnswer | None:
        """Decide on a push by its header alone. None: send the bytes; else this is the answer."""
        answer = self.shard.admit(member, header)
        return None if answer is None else self._answered(member, header, answer)

    def norms_of(self, header: PushHeader) -> PieceNorms:
        """For the bytes of a push that was admitted. Hand them to `inspect` as they come."""
        pieces = self.shard.owned(header.fragment_id).fragment.pieces
        return PieceNorms(header.payload, len(pieces), places_of(header.ranges, pieces))

    def inspect(self, norms: PieceNorms, chunk: Chunk) -> None:
        """Look at the next chunk, in the event loop: a fraction of the time that it takes to receive it."""
        began = self._cpu_clock()
        norms.add(chunk)
        self.metrics.rounds.computed("inspect", self._cpu_clock() - began)

    def contribute(
        self, caller: Identity, header: PushHeader, payload: Payload, norms: tuple[float, ...]
    ) -> PushAnswer:
        """Take a push whose bytes are whole. Raises as `member` does: the lease may have ended while they came.

        Raises Draining once the shard has ended.
        """
        self._check_open()
        member = self.member(caller)
        answer = self.shard.contribute(member, header, payload, norms, self.clock())
        return self._answered(member, header, answer)

    def reject(self, member: Member, header: PushHeader, refusal: Refusal) -> PushAnswer:
        """Answer a push whose bytes cannot be used."""
        return self._answered(member, header, self.shard.reject(member, header, refusal))

    def _answered(self, member: Member, header: PushHeader, answer: PushAnswer) -> PushAnswer:
        if answer.code != PART:
            self.telemetry.answered(member, header, answer)
        self.driver.carry_out_all()  # who is answered is counted; what follows from it is decided in a moment
        self.advance_later()
        return answer

    # ------------------------------------------------------------ the shell of its effects

    def tell(self, tell: Tell) -> None:
        self.streams.tell(tell)

    def start(self, job: Job, name: str) -> None:
        """Run a job and let the core go on after it; nothing once the shard has ended."""
        if self.closed:  # the last pushes have closed a round
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
            if self._computed_last == "seed":  # its bytes are free now, and no contribution is as large
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

    @contextlib.asynccontextmanager
    async def changing(self, merge: MergeRound) -> AsyncIterator[None]:
        """Held while the values of a fragment change and until they are durable. What it raises ends the shard."""
        async with self.keeper.hold(merge.fragment_id):  # a write of the version before may be under way
            try:
                yield
            except Exception as error:
                self.keeper.drop(merge.fragment_id)
                self._break(f"version {merge.version} of fragment {merge.fragment_id} cannot be made: {error}")
                raise

    def _break(self, why: str) -> None:
        """This process must end. The first reason is the one that counts."""
        self.why_broken = self.why_broken or why
        self.broken.set()

    def _written(self, fragment_id: int, version: int, manifest: Manifest) -> None:
        self._checkpointer.written(fragment_id, version, manifest)
        self.readers.is_on_disk(Committed(fragment_id, version, self.shard.epoch))

    async def keep(self, version: StoredVersion) -> None:
        """Make a version durable, as far as the settings ask for it. It may be announced when this returns.

        A standby that keeps pace holds the one before by then. It is waited for as long as a lease, and then not again
        before it has caught up by itself.
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
        """A standby holds this version."""
        self.readers.copied(fragment_id, version)
        self._moved.set()
