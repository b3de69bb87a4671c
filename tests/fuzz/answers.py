"""Wrong answers of one shard of two: it is away, whatever it says, no learner ends, and the other one's rounds go on.

Two shards and two learners of the product in the simulator, so waiting costs nothing. Between the learners and one of
the shards sits a liar, which answers for it: with any bytes, with the shard's own words changed, with refusals, with
errors that nobody thought of. One case is one wrong answer; the schedule follows from the seed.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import messages
from fuzzing import Finding, Result, mutated

from diloco_common.codec import Chunk, Payload
from diloco_common.codec.frames import frame_of
from diloco_common.errors import Refusal, refusal_from
from diloco_common.ports import Unavailable
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf
from diloco_common.wire.messages import (
    Directive,
    JoinAnswer,
    JoinRequest,
    Progress,
    PullHeader,
    PullRequest,
    PushAnswer,
    PushHeader,
)
from diloco_protos import parameter_server_pb2 as pb
from diloco_simulator.cluster import SimulatedCluster
from diloco_simulator.learner_process import LearnerProcess
from diloco_simulator.options import Options, draw_memory
from diloco_simulator.verify.invariants import Violation
from diloco_simulator.world.stage import PATTERN
from diloco_simulator.world.transport import MemoryTransport
from diloco_worker.shell.boundary import Start

LIAR = "1"
"""Address of the shard that lies."""
STANDS_S = 120.0
"""Virtual seconds without a version of the other shard."""
BACK_S = 60.0
"""Virtual seconds after the last lie until both learners are with both shards again."""
LIES = 0.5
"""Of the liar's answers."""
THOUGHT_OF_BY_NOBODY = "what is this?"
CODES = [kind.code for kind in Refusal.__subclasses__()]


class Lies:
    def __init__(self, seed: int, most: int) -> None:
        self.chance = random.Random(f"answers/{seed}")
        self.told: Counter[str] = Counter()
        self.rate = 0.0
        self.last = ""
        self._most = most

    @property
    def count(self) -> int:
        return self.told.total()

    @property
    def are_over(self) -> bool:
        return self.count >= self._most

    def lie(self) -> bool:
        return not self.are_over and self.chance.random() < self.rate

    def answer(self, kind: type[Any], truth: Any) -> bytes:
        data: bytes = truth.SerializeToString()
        self.last = f"instead of {kind.DESCRIPTOR.name} {data.hex()}"
        match self.chance.randrange(5):
            case 0:
                self.told["any bytes"] += 1
                return messages.body(self.chance, kind)
            case 1:
                self.told["ff ff ff ff"] += 1
                return b"\xff\xff\xff\xff"
            case 2:
                self.told["its bytes, changed"] += 1
                return mutated(self.chance, data)
            case 3:
                self.told["another message"] += 1
                return messages.drawn(self.chance, kind).SerializeToString()
            case _:
                self.told["one field changed"] += 1
                return _changed(self.chance, kind.FromString(data)).SerializeToString()

    def error(self) -> Exception:
        match self.chance.randrange(4):
            case 0:
                self.told["no answer"] += 1
                return Unavailable("cut off")
            case 1:
                self.told["an error that nobody thought of"] += 1
                return RuntimeError(THOUGHT_OF_BY_NOBODY)
            case _:
                code = self.chance.choice(CODES)
                self.told[f"refused {code}"] += 1
                return refusal_from(code, "\x1b[2J no \n" * self.chance.choice((1, 1000)))


def _changed(chance: random.Random, message: Any) -> Any:
    """One field, of it or of what it holds, is another number or text."""
    if not message.DESCRIPTOR.fields:
        return message
    field = chance.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None:
        inner = getattr(message, field.name)
        if field.is_repeated:
            if inner:
                _changed(chance, chance.choice(inner))
        else:
            _changed(chance, inner)
        return message
    value = messages._value(chance, field)
    if field.is_repeated:
        getattr(message, field.name).append(value)
    elif isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        with contextlib.suppress(ValueError):  # beyond what its type holds
            setattr(message, field.name, max(0, getattr(message, field.name) + chance.choice((-1, 1))))
    else:
        setattr(message, field.name, value)
    return message


class LyingTransport(MemoryTransport):
    """The way to a shard that lies now and then. What it says is read as it would be read from gRPC."""

    lies: Lies

    async def join(self, caller: Identity, request: JoinRequest, timeout_s: float) -> JoinAnswer:
        answer = await super().join(caller, request, timeout_s)
        if not self.lies.lie():
            return answer
        if self.lies.chance.random() < 0.4:
            raise self.lies.error()
        data = self.lies.answer(pb.JoinResponse, protobuf.to_pb(answer))
        return protobuf.join_answer_from_pb(protobuf.parse(pb.JoinResponse, data))

    def attend(self, caller: Identity) -> Any:
        return LyingStream(super().attend(caller), self.lies)

    async def push(self, caller: Identity, header: PushHeader, payload: Payload, timeout_s: float) -> PushAnswer:
        answer = await super().push(caller, header, payload, timeout_s)
        if not self.lies.lie():
            return answer
        if self.lies.chance.random() < 0.4:
            raise self.lies.error()
        if self.lies.chance.random() < 0.3:
            self.lies.told["pushes are not finite"] += 1
            return PushAnswer(protobuf.Outcome.REJECTED, "NOT_FINITE", "not finite")
        data = self.lies.answer(pb.PushResponse, protobuf.to_pb(answer))
        return protobuf.answer_from_pb(protobuf.parse(pb.PushResponse, data))

    async def pull(
        self, caller: Identity, request: PullRequest, timeout_s: float
    ) -> AsyncGenerator[PullHeader | Chunk, None]:
        async for part in super().pull(caller, request, timeout_s):
            if not self.lies.lie():
                yield part
                continue
            match self.lies.chance.randrange(4):
                case 0:
                    raise self.lies.error()
                case 1:
                    self.lies.told["a part is missing"] += 1
                case 2:
                    self.lies.told["a part came twice"] += 1
                    yield part
                    yield part
                case _ if isinstance(part, PullHeader):
                    data = self.lies.answer(pb.PullResponse, pb.PullResponse(header=protobuf.to_pb(part)))
                    yield protobuf.pull_part(data)
                case _:
                    self.lies.told["chunk changed"] += 1
                    yield protobuf.pull_part(mutated(self.lies.chance, frame_of(part)))

    async def leave(self, caller: Identity, timeout_s: float) -> None:
        if self.lies.lie():
            raise self.lies.error()
        await super().leave(caller, timeout_s)


class LyingStream:
    """The learner's end of a control stream of a liar."""

    def __init__(self, stream: Any, lies: Lies) -> None:
        self._stream, self._lies = stream, lies

    async def report(self, progress: Progress) -> None:
        await self._stream.report(progress)

    async def hear(self) -> Directive | None:
        while True:
            truth = await self._stream.hear()
            if truth is None or not self._lies.lie():
                return truth  # type: ignore[no-any-return]
            if (choice := self._lies.chance.random()) < 0.1:
                raise self._lies.error()
            if choice < 0.3:
                said = pb.Directive(evicted=pb.Evicted(code=self._lies.chance.choice([*CODES, "SUPERSEDED"])))
                self._lies.told[f"evicted {said.evicted.code}"] += 1
                data = said.SerializeToString()
            else:
                data = self._lies.answer(pb.Directive, protobuf.directive_to_pb(truth))
            directive = protobuf.directive_from_pb(protobuf.parse(pb.Directive, data))
            if directive is not None:
                return directive

    def cancel(self) -> None:
        self._stream.cancel()


class Trainer(LearnerProcess):
    """Trains beside the liar. What its values are is the liar's affair, where it is about the liar's fragments."""

    stage: Lied

    def _dial(self, address: str) -> MemoryTransport:
        path = self.learner_id, int(address)
        kind = LyingTransport if address == LIAR else MemoryTransport
        network, call_s = self.stage.network, self._options.call_s
        transport = kind(network, self.process, path, lambda *_: None, lambda *_: None, call_s)
        if isinstance(transport, LyingTransport):
            transport.lies = self.stage.lies
        return transport

    def _watch(self, act: Any) -> None:
        pass

    def _check(self) -> None:
        pass

    def _hear_error(self, what: str, facts: dict[str, object]) -> None:
        if str(facts.get("trace")) != THOUGHT_OF_BY_NOBODY:
            super()._hear_error(what, facts)


class Lied(SimulatedCluster):
    """Two learners, an honest shard, and one that lies once both train."""

    def __init__(self, seed: int, most: int) -> None:
        self.lies = Lies(seed, most)
        self.findings: list[str] = []
        self._version, self._grew_at, self._ended_at = 0, 0.0, 0.0
        super().__init__(_options(seed))

    def start_learner(self, learner_id: str) -> None:
        self.learners.append(Trainer(self, learner_id, PATTERN * 10.0, Start()))
        self.processes.append(self.learners[-1].process)
        self.starts[learner_id] += 1

    def broken_promise(self) -> Violation | None:
        """Nothing is promised of the fragments of a shard that lies."""
        return None

    def _look_after(self) -> None:
        now = self.timeline.now
        self.timeline.later(self.options.look_every_s, self._look_after)
        if not self.lies.rate and [learner.state for learner in self.learners] != ["training"] * 2:
            return
        if not self.lies.rate:
            self.lies.rate, self._grew_at = LIES, now
        for learner in self.learners:
            if learner.state != "training":
                self._found(f"{learner.name} is {learner.state}: {learner.error!r}")
        host = self.shards[0].host
        version = 0 if host is None else sum(state.version for state in host.shard.fragments.values())
        if version > self._version:
            self._version, self._grew_at = version, now
        elif now - self._grew_at > STANDS_S:
            self._found(f"the other shard stands at {version}")
        if self.lies.are_over:
            self._ended_at = self._ended_at or now
            if all(len(learner.learner.connections.shards_up) == 2 for learner in self.learners):  # type: ignore[union-attr]
                self.timeline.stop()
            elif now - self._ended_at > BACK_S:
                self._found("the lies are over, and a learner is not back")

    def _found(self, what: str) -> None:
        self.findings.append(f"after {self.lies.count} wrong answers: {what}")
        self.timeline.stop()


def _options(seed: int) -> Options:
    """Nothing fails but what is told."""
    return replace(
        draw_memory(1), seed=seed, shards=2, learners=2, fragments=4, sync_every=2, quorum=1, grace=0.3,
        staleness_max=8, merge="mean", push="float32", pull="float32", budget=0,
        lease_s=20.0, heartbeat_s=1.0, step_s=(4.0, 5.0), codec_s=0.01, stutters=0.0,
        resumes=0.0, max_pushes=64, call_s=5.0, long_delays=0.0, loss=0.0, duplicates=0.0, faults=(), hostile=0,
        faults_s=1e12, tick_s=1.0,
    )  # fmt: skip


def offer(seed: int, numbers: range) -> Result:
    """So many wrong answers, in one schedule."""
    result, cluster = Result(), Lied(seed, len(numbers))
    try:
        cluster.run()
    except Exception as error:  # whatever it is, it left the product
        cluster.findings.append(f"after {cluster.lies.count} wrong answers: {error!r}")
    result.answers.update(cluster.lies.told)
    for what in cluster.findings:
        result.found(Finding("answers", seed, cluster.lies.count, what, cluster.lies.last))
    return result
