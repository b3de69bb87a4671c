"""The connection of a learner to one shard: link.py, puller.py and pusher.py of diloco_worker, in virtual time.

What differs is what the network is made of: `Network.call` for a unary call, `Stream` for Attend. When to dial again
and what goes to the training is production code (`core/dialing.py`, `core/events.py`). Keep the rest in step: a change
there belongs here too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco_common.codec import Payload
from diloco_common.errors import (
    BadRequest,
    LeaseExpired,
    NotJoined,
    Refusal,
    StaleGeneration,
    Stalled,
    Superseded,
    WrongEpoch,
)
from diloco_common.manifest import Manifest, TensorSpec
from diloco_common.messages import (
    Collect,
    Committed,
    Directive,
    Evicted,
    Held,
    LearnerPolicy,
    Progress,
    Pulse,
    PushAnswer,
    PushHeader,
    Stop,
)
from diloco_simulator.arithmetic import Arithmetic, Value
from diloco_simulator.messages import JoinAnswer, JoinRequest, PullAnswer, PullRequest, PushRequest
from diloco_simulator.network import Network, Stream, Unavailable
from diloco_simulator.timeline import Alarm, Future, Process, Signal, Task
from diloco_worker.core.dialing import JOIN_AGAIN, SILENCE_HEARTBEATS, STEADY_S, TRY_AGAIN, backoff_s
from diloco_worker.core.events import Answered, Arrived, Asked, EventQueue, Failed, Joined, Stopped
from diloco_worker.core.fragment import Pending
from diloco_worker.core.pushes import Lease

SEED_ENCODING = "float32"
CODEC_S = 0.01
"""Mean of what encoding or decoding takes."""

REFUSALS: dict[str, type[Refusal]] = {
    r.code: r for r in (NotJoined, LeaseExpired, Stalled, Superseded, WrongEpoch, StaleGeneration)
}


@dataclass(frozen=True)
class LinkContext:
    """What all links of one learner share."""

    learner_id: str
    process_id: str
    tensors: tuple[TensorSpec, ...]
    inbox: EventQueue
    process: Process
    network: Network
    random: random.Random
    call_s: float
    arithmetic: Arithmetic
    progress: Callable[[], Progress]
    encoded: Callable[[Pending, Payload], None]
    """A contribution was encoded."""
    note: Callable[..., None]


class ShardLink:
    """One shard, seen from one learner."""

    def __init__(self, shard_index: int, context: LinkContext) -> None:
        self.connected = False
        self.shard_index = shard_index
        self.generation = 0
        self.epoch = 0
        self.pulse = Pulse(0, 0)
        self._tokens_merged: dict[int, int] = {}
        self._c = context
        self._leaving = False
        self._heartbeat_s = 1.0
        self._policy: LearnerPolicy | None = None
        self._manifest: Manifest | None = None
        self._announced: dict[int, tuple[int, int]] = {}
        self._fetched: dict[int, tuple[int, int]] = {}
        self._last: dict[int, Held] = {}
        self._anchors: dict[int, Value] = {}
        self._news = Signal()
        self._stream: Stream | None = None
        self._heartbeat: Alarm | None = None
        self._encoded: dict[int, tuple[Pending, Payload]] = {}
        self._pushes: list[Task] = []
        self._path = (context.learner_id, shard_index)

    # ------------------------------------------------------------ for the network thread

    async def run(self) -> None:
        puller = self._c.process.spawn(self._pull_news(), "pull")
        try:
            await self._stay_connected()
        except Refusal as refusal:
            self._c.inbox.put(Failed(refusal))
        finally:
            puller.cancel()
            for push in self._pushes:
                push.cancel()

    def know(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._news.set()

    def stepped(self) -> None:
        if self._stream is not None:
            self._report()

    def push(self, pending: Pending) -> None:
        self._pushes = [task for task in self._pushes if not task.done]
        if pending.begin_push(self._lease):
            name = f"push {pending.fragment_id} of round {pending.round}"
            self._pushes.append(self._c.process.spawn(self._push_contribution(pending, self._lease), name))

    def seed(self, fragment_id: int, values: Value) -> None:
        push = self._push_seed(fragment_id, values, self._lease)
        self._pushes.append(self._c.process.spawn(push, f"seed {fragment_id}"))

    @property
    def settled(self) -> bool:
        return not self.connected or all(task.done for task in self._pushes)

    async def leave(self) -> None:
        self._leaving = True
        if self.connected:
            try:
                await self._call("Leave", PullRequest(self._c.learner_id, self.generation, self.epoch, -1, None), 1.0)
            except (Unavailable, TimeoutError, Refusal):
                return

    # ------------------------------------------------------------ control

    async def _stay_connected(self) -> None:
        attempt = 0
        timeline = self._c.process.timeline
        while True:
            began, had_lease = timeline.now, self.generation > 0
            try:
                if not self.generation:
                    await self._join()
                await self._attend()
            except JOIN_AGAIN:
                self.generation = 0
                if had_lease:
                    attempt = 0
            except TRY_AGAIN:
                pass
            except (Unavailable, TimeoutError):
                pass
            finally:
                self.connected = False
            if self._leaving:
                return
            if timeline.now - began > STEADY_S:
                attempt = 0
            await self._backoff(attempt)
            attempt += 1

    async def _join(self) -> None:
        request = JoinRequest(self._c.learner_id, self._c.process_id, self._c.tensors, self._held())
        answer: JoinAnswer = await self._call("Join", request)
        if answer.epoch != self.epoch:
            self._announced.clear()
            self._encoded.clear()
        self.generation, self.epoch = answer.generation, answer.epoch
        self._heartbeat_s = answer.heartbeat_s
        self._policy = answer.policy
        self.pulse = answer.pulse
        self._c.inbox.put(
            Joined(
                f"shard-{answer.shard_index}", answer.shard_index, answer.num_shards, answer.num_fragments,
                answer.manifest_digest, answer.policy, answer.epoch, answer.fragments,
            )
        )  # fmt: skip
        self._c.note("joined", self._c.process_id, self.shard_index, self.generation, self.epoch)

    def _held(self) -> tuple[Held, ...]:
        return tuple(held for _, held in sorted(self._last.items()))

    async def _attend(self) -> None:
        process, silence_s = self._c.process, SILENCE_HEARTBEATS * self._heartbeat_s
        stream = self._c.network.attend(process, self._path, self.generation, self.epoch, self._hear, silence_s)
        heartbeat = Alarm(process, self._heartbeat_s, self._report)
        self._stream, self._heartbeat = stream, heartbeat
        try:
            self._report()
            await stream.ended
        finally:
            self._stream = None
            heartbeat.stop()
            stream.cancel()

    def _report(self) -> None:
        assert self._stream is not None
        assert self._heartbeat is not None
        self._stream.report(self._c.progress())
        self._heartbeat.put_off()

    def _hear(self, directive: Directive) -> None:
        self.connected = True
        match directive:
            case Collect():
                self._c.inbox.put(Asked(directive, self.epoch))
            case Committed():
                self._announced[directive.fragment_id] = (directive.epoch, directive.version)
                self._news.set()
            case Pulse():
                self.pulse = directive
            case Stop():
                self._c.inbox.put(Stopped(self.shard_index))
            case Evicted():
                self._c.note("evicted", self._c.process_id, self.shard_index, directive.code)
                raise REFUSALS[directive.code](*_arguments(directive))

    # ------------------------------------------------------------ bulk

    async def _pull_news(self) -> None:
        attempt = 0
        while True:
            await self._news.wait()
            self._news.clear()
            if self._manifest is None:
                continue
            if self._announced == self._fetched:
                continue
            for fragment_id, version in sorted(self._announced.items()):
                if self._fetched.get(fragment_id) == version or not self.generation:
                    continue
                try:
                    await self._pull(fragment_id)
                    attempt = 0
                except (Unavailable, TimeoutError, Refusal) as error:
                    if isinstance(error, Refusal):
                        self._fetched.pop(fragment_id, None)
                        self._anchors.pop(fragment_id, None)
                    self._news.set()
                    await self._backoff(attempt)
                    attempt += 1

    async def _pull(self, fragment_id: int) -> None:
        assert self._manifest is not None
        known, anchor = self._fetched.get(fragment_id), self._anchors.get(fragment_id)
        request = PullRequest(self._c.learner_id, self.generation, self.epoch, fragment_id, known)
        epoch = self.epoch
        pulled: PullAnswer | None = await self._call("Pull", request)
        if pulled is None:
            return
        if pulled.base_version is not None and (known is None or pulled.base_version != known[1]):
            raise BadRequest("a change since another version than was asked for")
        base = anchor if pulled.base_version is not None else None
        values = self._c.arithmetic.decode_version(pulled.payload, base)
        await self._codec()
        if self.epoch != epoch:
            return
        self._fetched[fragment_id] = (pulled.epoch, pulled.version)
        self._last[fragment_id] = Held(fragment_id, pulled.epoch, pulled.version)
        self._anchors[fragment_id] = values
        self._tokens_merged[fragment_id] = pulled.tokens_merged
        self._forget(fragment_id, pulled.version)
        self._c.inbox.put(
            Arrived(
                fragment_id, pulled.version, pulled.epoch, values, pulled.merged_version,
                forgotten_version=pulled.forgotten_version,
            )
        )  # fmt: skip

    async def _push_contribution(self, pending: Pending, lease: Lease) -> None:
        fragment_id, round_number = pending.fragment_id, pending.round
        payload = await self._payload(pending)
        header = self._header(
            fragment_id, round_number, pending.base_version, pending.tokens, pending.steps, payload, 0, pending.epoch
        )
        answer = await self._push_until_answered(header, payload, lease)
        pending.pushes.ended(lease, answer)
        if answer is not None:
            self._c.inbox.put(Answered(fragment_id, round_number, answer))

    def _forget(self, fragment_id: int, version: int) -> None:
        known = self._encoded.get(fragment_id)
        if known is not None and known[0].round <= version:
            del self._encoded[fragment_id]

    async def _push_seed(self, fragment_id: int, values: Value, lease: Lease) -> None:
        if fragment_id in self._announced:
            return
        await self._codec()
        payload = self._c.arithmetic.encode_seed(values, SEED_ENCODING)
        known = self._tokens_merged.get(fragment_id, 0)
        header = self._header(fragment_id, 0, 0, 0, 0, payload, known)
        await self._push_until_answered(header, payload, lease)

    async def _payload(self, pending: Pending) -> Payload:
        assert self._policy is not None
        await self._codec()
        known = self._encoded.get(pending.fragment_id)
        if known is None or known[0] is not pending:
            payload = pending.encode(self._policy.push_encoding)
            self._c.encoded(pending, payload)
            known = (pending, payload)
            self._encoded[pending.fragment_id] = known
        return known[1]

    async def _push_until_answered(self, header: PushHeader, payload: Payload, lease: Lease) -> PushAnswer | None:
        attempt = 0
        while lease == self._lease:
            request = PushRequest(self._c.learner_id, self.generation, self.epoch, header, payload)
            try:
                answer: PushAnswer = await self._call("Push", request)
            except (Unavailable, TimeoutError, *TRY_AGAIN):
                await self._backoff(attempt)
                attempt += 1
                continue
            except Refusal:
                return None
            return answer if lease == self._lease else None
        return None

    # ------------------------------------------------------------ helpers

    def _header(
        self, fragment_id: int, round_number: int, base_version: int, tokens: int, steps: int, payload: Payload,
        tokens_merged: int, epoch: int | None = None,
    ) -> PushHeader:  # fmt: skip
        assert self._manifest is not None
        return PushHeader(
            fragment_id, round_number, self.epoch if epoch is None else epoch, base_version, tokens, steps,
            payload.header, self._manifest.digest, tokens_merged,
        )  # fmt: skip

    def _call(self, method: str, request: Any, timeout_s: float | None = None) -> Future[Any]:
        return self._c.network.call(self._c.process, self._path, method, request, timeout_s or self._c.call_s)

    def _backoff(self, attempt: int) -> Future[None]:
        return self._c.process.sleep(backoff_s(attempt, self._c.random.random()))

    def _codec(self) -> Future[None]:
        return self._c.process.sleep(CODEC_S * 2 * self._c.random.random())

    @property
    def _lease(self) -> Lease:
        return Lease(self.epoch, self.generation)


def _arguments(directive: Evicted) -> tuple[Any, ...]:
    """Of the refusal that an eviction is turned into."""
    return ("the learner", 0, 0) if directive.code == StaleGeneration.code else (directive.message,)
