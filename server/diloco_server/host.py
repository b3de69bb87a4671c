"""The shell around one core `Shard`: its event loop, its compute thread, and the control streams.

Everything that touches the core runs in the event loop, so it has one owner. Arithmetic on whole fragments (checking
norms, seeding, merging, encoding) runs on one compute thread: two OpenMP teams on the same cores are slower than one.
Versions are made durable by `Keeper`, on threads of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from diloco_common.codec import Payload, encode_payload
from diloco_common.codec.change import VALUES
from diloco_common.errors import Draining
from diloco_common.logs import Log
from diloco_common.messages import Directive, PushAnswer, PushHeader
from diloco_common.metrics import ComputePhase, ShardMetrics
from diloco_common.settings import Settings
from diloco_server.checkpointer import Checkpointer
from diloco_server.core import arithmetic
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.effects import Effect, MergeRound, SeedFragment, Tell
from diloco_server.core.membership import Member
from diloco_server.core.merge import piece_norms
from diloco_server.core.outer import make_outer_optimizer
from diloco_server.core.record import Record
from diloco_server.core.shard import Shard
from diloco_server.keeper import Keeper
from diloco_server.observer import Observer
from diloco_server.recovery import recover
from diloco_server.storage.store import Store
from diloco_server.storage.version import StoredVersion

TICK_S = 0.02
"""How often time passes for the core; the resolution of grace windows and leases."""
DECISION_WAIT = 4.0
"""How long events wait for the next decision, in durations of the last one: so a fifth of a core decides, at most."""
BACKLOG_MAX = 4096
"""Directives that wait for a learner that does not read; more, and its stream is ended so that it comes back."""

T = TypeVar("T")


class ControlStream:
    """Directives on their way to one learner."""

    def __init__(self, learner_id: str, generation: int) -> None:
        self.learner_id = learner_id
        self.generation = generation
        self._queue: asyncio.Queue[Directive | None] = asyncio.Queue(BACKLOG_MAX)

    def send(self, directive: Directive) -> None:
        try:
            self._queue.put_nowait(directive)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """No more directives. Those that wait still go out, unless they are too many: a goodbye may be among them."""
        if self._queue.full():
            while not self._queue.empty():
                self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def next(self) -> Directive | None:
        """The next directive; None at the end."""
        return await self._queue.get()


class ShardHost:
    """Runs one shard. Create and use it inside one event loop; call `run` as a task."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        metrics: ShardMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.metrics = metrics
        self.shard = Shard(settings, store.epoch)
        self.started_at = clock()
        self.log = Log(f"shard-{settings.shard.index}")
        self.observer = Observer(self.shard, metrics, self.log, clock)
        self._checkpointer = Checkpointer(settings, metrics, self.log)
        self.keeper = Keeper(store, settings.shard, metrics, self.log, self._checkpointer.written)
        self._store = store
        self._recovering = False
        self._outer = make_outer_optimizer(settings.outer)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="diloco-compute")
        self._streams: dict[str, ControlStream] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self.broken = asyncio.Event()
        """Set when a merge failed half way: the values in memory are of no version, so this process must end."""
        self.why_broken = ""
        self._closed = False
        self._soon: asyncio.TimerHandle | None = None  # the decision that events wait for
        self._decision_s = 0.0  # how long the last decision took

    # ------------------------------------------------------------ life

    async def recover(self) -> None:
        """Go on from what the store holds, before anybody is served. Raises DataError and OSError."""
        self._recovering, began = True, self.clock()
        work = partial(recover, self._store, self.settings, self._outer, self.log)
        recovered = await asyncio.get_running_loop().run_in_executor(self._compute, work)
        self._recovering = False
        if recovered is None:
            return
        manifest, fragments = recovered
        self.shard.restore(manifest, fragments)
        for restored in fragments:
            state = self.shard.fragments[restored.record.fragment_id]
            self.observer.announcing(state, restored.record.epoch)
            self.keeper.recovered(restored.record.fragment_id)
            self.metrics.rounds.version(restored.record.fragment_id, restored.record.version)
        self._checkpointer.begin({r.record.fragment_id: r.record.version for r in fragments}, manifest)
        self.log.event(
            "recovered", fragments=len(fragments), parameters=sum(r.values.theta.numel() for r in fragments),
            tokens_merged=self.shard.tokens_merged, epoch=self.shard.epoch, took_s=round(self.clock() - began, 2),
        )  # fmt: skip

    async def run(self) -> None:
        """Let time pass for the core until cancelled."""
        next_pulse = self.clock()
        while True:
            now = self.clock()
            if now >= next_pulse:
                self.shard.send_pulses()
                next_pulse = now + self.settings.lease.heartbeat_s
                self.observer.sample(now, is_ready=self.ready()[0])
                self.metrics.storage.not_durable(self.keeper.not_durable)
            self.advance()
            await asyncio.sleep(TICK_S)

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, and finish what is under way: rounds that learners were asked for, and merges.

        `run` goes on meanwhile. After `timeout_s` seconds it is left: learners push again what was not merged.
        """
        self.log.event("draining", open_rounds=self.shard.open_rounds, open_merges=len(self._jobs))
        self.shard.drain()
        self.advance()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s  # not `clock`: the process is about to be killed in real time
        while (self._jobs or (self.shard.open_rounds and self._streams)) and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(TICK_S)
        await self.keeper.flush(timeout_s)

    def close(self) -> None:
        """End every control stream, the compute thread, and the work that a drain has left.

        A version that is still being made is not announced then: what goes into it is pushed again.
        """
        self._closed = True
        if self._soon is not None:
            self._soon.cancel()
        for job in self._jobs:
            job.cancel()
        for stream in self._streams.values():
            stream.end()
        self._compute.shutdown(wait=False, cancel_futures=True)
        self.keeper.close()
        self._checkpointer.close()

    async def writes_ended(self, timeout_s: float) -> bool:
        """After `close`: wait until no thread writes to the data folder. False if one still does after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while is_writing := self.keeper.is_writing or self._checkpointer.is_writing:
            if loop.time() > deadline:
                break
            await asyncio.sleep(TICK_S)
        return not is_writing

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
        return True, "serving"

    # ------------------------------------------------------------ for the service

    def advance(self) -> None:
        """Let the core decide, and carry out what it asks for. After every event."""
        began = time.perf_counter()
        self.shard.tick(self.clock())
        self._decision_s = time.perf_counter() - began
        while effects := self.shard.take_effects():
            for effect in effects:
                self._carry_out(effect)

    def advance_soon(self) -> None:
        """The same in a moment, once for all events until then: for events that come from every learner, all the time.

        A decision looks at every learner and fragment, so one per event would cost the square of the learners.
        """
        if self._soon is None:
            wait_s = DECISION_WAIT * self._decision_s
            self._soon = asyncio.get_running_loop().call_later(wait_s, self._advance_now)

    def _advance_now(self) -> None:
        self._soon = None
        self.advance()

    def open_stream(self, member: Member) -> ControlStream:
        """The control stream of a generation; replaces an older one of the same learner."""
        stream = ControlStream(member.learner_id, member.generation)
        old = self._streams.get(member.learner_id)
        if old is not None:
            old.end()
        self._streams[member.learner_id] = stream
        self.shard.attend(member)
        self.advance()
        return stream

    def leave(self, member: Member) -> None:
        """A learner says goodbye: nothing more is told to it."""
        self.shard.leave(member)
        stream = self._streams.get(member.learner_id)
        if stream is not None:
            stream.end()
        self.advance()

    def close_stream(self, stream: ControlStream) -> None:
        if self._streams.get(stream.learner_id) is stream:
            del self._streams[stream.learner_id]

    async def inspect(self, header: PushHeader, payload: Payload) -> tuple[float, ...]:
        """Norms of the pieces that a payload holds. Raises BadEncoding."""
        pieces = self.shard.owned(header.fragment_id).fragment.pieces
        return await self.compute("inspect", lambda: piece_norms(payload, pieces))

    async def until_announced(self, fragment_id: int) -> None:
        """Wait until the values are those of the announced version, and not ahead of it."""
        state = self.shard.owned(fragment_id)
        while state.computing:  # noqa: ASYNC110
            await asyncio.sleep(TICK_S)

    async def encode(self, fragment_id: int, encoding: str) -> Payload:
        """The values in an encoding other than the run's, for one caller alone: as they are when this is called, as
        whatever changes them later comes later on the compute thread. Raises Draining."""
        values = self.shard.owned(fragment_id).values
        assert values is not None
        return await self.compute("encode", lambda: encode_payload(values.theta, encoding))

    async def compute(self, phase: ComputePhase, work: Callable[[], T]) -> T:
        """Run arithmetic on the compute thread, in the order of the calls. Raises Draining once the shard has ended."""
        if self._closed:
            raise Draining("this shard has ended; it will be asked for again in its next life")

        def timed() -> T:
            began = time.thread_time()
            try:
                return work()
            finally:
                self.metrics.rounds.computed(phase, time.thread_time() - began)

        return await asyncio.get_running_loop().run_in_executor(self._compute, timed)

    def answered(self, member: Member, header: PushHeader, answer: PushAnswer) -> PushAnswer:
        """Note the outcome of a push, and let the core go on."""
        self.observer.answered(member, header, answer)
        self.advance_soon()
        return answer

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Tell():
                stream = self._streams.get(effect.learner_id)
                if stream is not None and stream.generation == effect.generation:
                    stream.send(effect.directive)
            case SeedFragment():
                self._start(self._seed(effect), f"seed-{effect.fragment_id}")
            case MergeRound():
                self.observer.merging(effect)
                self._start(self._merge(effect), f"merge-{effect.fragment_id}")
            case _:
                self.observer.note(effect)

    def _start(self, job: Coroutine[Any, Any, None], name: str) -> None:
        if self._closed:  # the last pushes have closed a round
            job.close()
            return
        task = asyncio.create_task(job, name=name)
        self._jobs.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.log.error("job failed", trace=task.exception(), job=task.get_name())

    async def _seed(self, effect: SeedFragment) -> None:
        """Make version 0 of a fragment."""
        encoding = self.settings.sync.pull

        def work() -> tuple[arithmetic.Values, arithmetic.Published]:
            values = arithmetic.seed(effect.payload, self._outer)
            return values, arithmetic.publish(values, encoding)

        try:
            values, published = await self.compute("seed", work)
            await self._keep(self.shard.seed_record(effect.fragment_id), values, published)
        except Exception:
            self.shard.seed_failed(effect.fragment_id)
            raise
        self.shard.seeded(effect.fragment_id, values, published)
        self.observer.announcing(self.shard.fragments[effect.fragment_id])
        self.log.event("fragment seeded", fragment=effect.fragment_id, elements=values.theta.numel())
        self.advance()

    async def _merge(self, effect: MergeRound) -> None:
        """Make the next version of a fragment from a closed round."""
        state = self.shard.fragments[effect.fragment_id]
        sync = self.settings.sync
        values, before = state.values, state.published
        assert values is not None

        def work() -> tuple[arithmetic.Published, float]:
            began = time.perf_counter()
            arithmetic.step(
                values, state.fragment, effect.contributions,
                outer_step=effect.version, rule=sync.merge, optimizer=self._outer,
            )  # fmt: skip
            merged_s = time.perf_counter() - began
            return arithmetic.publish(values, sync.pull, before), merged_s

        async with self.keeper.hold(effect.fragment_id):  # a write of the version before may be under way
            try:
                published, merged_s = await self.compute("merge", work)
                self.metrics.rounds.merged(merged_s)
                await self._keep(self.shard.next_record(effect.fragment_id), values, published)
            except Exception as error:
                self.keeper.drop(effect.fragment_id)
                self.why_broken = f"version {effect.version} of fragment {effect.fragment_id} cannot be made: {error}"
                self.broken.set()
                raise
        self.shard.committed(effect.fragment_id, published, self.clock())
        self.observer.announcing(state)
        self.advance()

    async def _keep(self, record: Record, values: Values, published: Published) -> None:
        """Make a version durable, as far as the settings ask for it; until then it is not announced."""
        assert self.shard.manifest is not None
        anchor = None if self.settings.sync.pull in VALUES else published.values
        await self.keeper.keep(StoredVersion(record, values, anchor), self.shard.manifest)
