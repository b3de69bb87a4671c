"""Real shards inside the test's process, and a caller that speaks diloco.v1 message by message.

One event loop in a thread runs shards and callers; tests are plain functions that wait for values with a deadline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import torch

from builders import chunk_request
from diloco_common.codec import Payload, encode_payload
from diloco_common.settings import Settings
from diloco_common.trust.files import read_folder
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.manifest import Manifest, TensorSpec, cut
from diloco_common.wire.messages import PROTOCOL, Progress, PushHeader
from diloco_protos import parameter_server_pb2 as pb
from diloco_protos import parameter_server_pb2_grpc as pb_grpc
from diloco_server.shell.server import ShardServer
from waiting import DEADLINE_S, until

CHUNK_ELEMENTS = 256
TENSORS = (TensorSpec("layer.bias", (5,)), TensorSpec("layer.weight", (60, 10)))
NUM_ELEMENTS = 605
"""Of the one fragment that TENSORS make: three chunks of CHUNK_ELEMENTS."""
ANSWER_LOST = "Internal error from Core"
"""What grpc.aio makes of an answer that comes while it sends a message (grpc/grpc#36066). Pushing again is safe."""

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in its own thread."""

    def __init__(self) -> None:
        self._ending: list[Future[Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="contract-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and wait for what it returns or raises."""

        async def bounded() -> T:
            return await asyncio.wait_for(work, DEADLINE_S)

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result(DEADLINE_S + 5)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop; the test waits for it when it wants to."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def look(self, question: Callable[[], T]) -> T:
        """Ask something of state that the loop owns."""

        async def ask() -> T:
            return question()

        return self.run(ask())

    def finish(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine that nobody waits for before the loop is closed."""
        self._ending.append(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        for future in self._ending:
            future.result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


DRAIN_S = 0.5
"""Learners of most tests do not step while their shard ends, so nothing of them would come."""


@dataclass
class Clock:
    """Time that passes when the test says so, in seconds."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def settings_with(**sections: dict[str, Any]) -> Settings:
    """Settings of one small, fast shard; a test names what matters to it."""
    small = {
        "sync": {
            "fragments": 1,
            "sync_every": 1,
            "quorum": "all",
            "merge": "mean",
            "grace": 0.0,
            "push": "int8",
            "pull": "bfloat16",
        },
        "outer": {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0},
        "lease": {"lease_s": 2.0, "heartbeat_s": 0.2},
    }
    merged = {name: small.get(name, {}) | sections.get(name, {}) for name in small.keys() | sections.keys()}
    return Settings.model_validate(merged)


@dataclass(frozen=True)
class State:
    """What bad input must leave as it is."""

    versions: dict[int, int]
    theta: dict[int, bytes]
    contributions: dict[int, tuple[str, ...]]
    tokens_merged: int


class InProcessShard:
    """A shard that serves on a free port of the loopback."""

    def __init__(self, loop: LoopThread, settings: Settings, clock: Callable[[], float] | None = None) -> None:
        self.loop = loop
        self.settings = settings
        self.server = loop.look(lambda: ShardServer(settings, clock))
        self._callers: list[Caller] = []
        self._running = False

    def start(self) -> InProcessShard:
        self.loop.run(self.server.start())
        self._running = True
        return self

    def stop(self) -> None:
        """End the shard as SIGTERM does. Repeating it is fine."""
        self.loop.run(self._stop())

    def stop_soon(self) -> None:
        """End the shard while the next test begins."""
        self.loop.finish(self._stop())

    async def _stop(self) -> None:
        for caller in self._callers:
            await caller.channel.close()
        self._callers.clear()
        if self._running:
            self._running = False
            await self.server.stop(DRAIN_S)

    def break_streams(self) -> None:
        def end() -> None:
            for stream in self.server.host.streams:
                stream.end()

        self.loop.look(end)

    @property
    def address(self) -> str:
        return self.server.grpc_address

    @property
    def core(self) -> Any:
        return self.server.host.shard

    @property
    def ledger(self) -> Any:
        return self.core.ledger

    def caller(self, learner_id: str = "a", **identity: Any) -> Caller:
        caller = Caller(self, Identity(identity.pop("run_id", self.settings.run.id), learner_id), **identity)
        self._callers.append(caller)
        return caller

    def metric(self, name: str, **labels: str) -> float:
        value = self.server.host.metrics.registry.get_sample_value(f"diloco_shard_{name}", labels)
        return value or 0.0

    def state(self) -> State:
        def look() -> State:
            fragments = self.core.fragments
            return State(
                {i: f.version for i, f in fragments.items()},
                {i: f.values.theta.numpy().tobytes() if f.values else b"" for i, f in fragments.items()},
                {i: tuple(sorted(f.round.contributions)) if f.round else () for i, f in fragments.items()},
                self.core.tokens_merged,
            )

        return self.loop.look(look)

    def version(self, fragment_id: int = 0) -> int:
        return int(self.core.fragments[fragment_id].version)

    def member_state(self, learner_id: str) -> str:
        member = self.core.membership.get(learner_id)
        return member.state.value if member else "unknown"


@dataclass(frozen=True)
class Refused:
    status: grpc.StatusCode
    code: str
    words: str


@dataclass
class Attendance:
    loop: LoopThread
    call: Any
    heard: list[Any] = field(default_factory=list)

    def say(self, inner_step: int, tokens: int = 0, loss: float | None = None) -> None:
        message = protobuf.progress_to_pb(Progress(inner_step, tokens, loss))
        self.loop.run(self.call.write(message))

    def hear(self, kind: type[T]) -> T:
        """The next directive of a kind; raises AssertionError if the stream ends before."""

        async def read() -> T:
            while (message := await self.call.read()) is not rpc.EOF:
                directive = protobuf.directive_from_pb(message)
                self.heard.append(directive)
                if isinstance(directive, kind):
                    return directive
            raise AssertionError(f"the stream ended without {kind.__name__}: {self.heard}")

        return self.loop.run(read())

    def ends(self) -> bool:
        """Whether the shard ends the stream; waits for it."""

        async def read() -> bool:
            while (message := await self.call.read()) is not rpc.EOF:
                self.heard.append(protobuf.directive_from_pb(message))
            return True

        return self.loop.run(read())

    def cancel(self) -> None:
        self.loop.look(self.call.cancel)


class Caller:
    """Speaks for one learner, as exactly or as wrongly as it is told."""

    def __init__(
        self, shard: InProcessShard, identity: Identity, token: str | None = None, tls: Path | None = None
    ) -> None:
        files = None if tls is None else read_folder(tls)
        self.shard = shard
        self.loop = shard.loop
        self.identity = identity
        self.token = token
        self.manifest: Manifest = cut(TENSORS, shard.settings.sync.fragments, shard.settings.shard.count)
        self.channel = self.loop.look(lambda: rpc.channel(shard.address, files, rpc.CHANNEL_OPTIONS))
        self.stub = pb_grpc.ParameterServerStub(self.channel)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return rpc.metadata_of(self.identity, self.token)

    def join(
        self, tensors: Sequence[TensorSpec] = TENSORS, *, process_id: str = "", protocol: int = PROTOCOL,
        decodes: Sequence[str] = rpc.DECODES, observe: bool = False,
    ) -> pb.JoinResponse:  # fmt: skip
        request = pb.JoinRequest(
            protocol=protocol, process_id=process_id or f"process of {self.identity.learner_id}",
            tensors=protobuf.tensors_to_pb(tensors), decodes=decodes, observe=observe,
        )  # fmt: skip
        # Join is called without a generation, as a learner does.
        who = Identity(self.identity.run_id, self.identity.learner_id)
        answer = self._unary(self.stub.Join, request, rpc.metadata_of(who, self.token))
        self.identity = replace(self.identity, generation=answer.generation, epoch=answer.epoch)
        return answer

    def attend(self) -> Attendance:
        async def open_stream() -> Any:
            return self.stub.Attend(metadata=self.metadata())

        return Attendance(self.loop, self.loop.run(open_stream()))

    def push(self, header: PushHeader, payload: Payload) -> pb.PushResponse:
        return self.push_messages(
            [
                pb.PushRequest(header=protobuf.to_pb(header)),
                *(chunk_request(c) for c in payload.chunks),
            ]
        )

    def push_messages(self, messages: Iterable[pb.PushRequest], *, hold: bool = False) -> pb.PushResponse:
        """Send these messages. With `hold` the stream then stays open, until the shard answers."""

        async def push() -> pb.PushResponse:
            call = self.stub.Push(metadata=self.metadata(), timeout=DEADLINE_S)
            try:
                for message in sent:
                    await call.write(message)
                if not hold:
                    await call.done_writing()
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                pass  # answered already: the call itself says how
            return await call

        async def push_until_answered() -> pb.PushResponse:
            while True:
                try:
                    return await push()
                except grpc.aio.AioRpcError as error:
                    if error.details() != ANSWER_LOST:
                        raise

        sent = list(messages)
        return self.loop.run(push_until_answered())

    def pull(
        self, fragment_id: int = 0, encodings: Sequence[str] = (), have_version: int | None = None
    ) -> tuple[pb.PullHeader, list[bytes]]:
        request = pb.PullRequest(
            fragment_id=fragment_id, encodings=encodings, have_version=have_version, epoch=self.identity.epoch
        )

        async def pull() -> tuple[pb.PullHeader, list[bytes]]:
            call = self.stub.Pull(request, metadata=self.metadata(), timeout=DEADLINE_S)
            messages = [message async for message in call]
            return messages[0].header, [message.chunk for message in messages[1:]]

        return self.loop.run(pull())

    def leave(self) -> None:
        self._unary(self.stub.Leave, pb.LeaveRequest(), self.metadata())

    def _unary(self, method: Any, request: Any, metadata: Any) -> Any:
        async def call() -> Any:
            return await method(request, metadata=metadata, timeout=DEADLINE_S)

        return self.loop.run(call())

    def seed(self, value: float = 0.5) -> None:
        """Bring version 0 of every fragment that the shard owns: the same value everywhere."""
        for fragment in self.manifest.owned_by(self.shard.settings.shard.index):
            payload = encode_payload(torch.full((fragment.num_elements,), value), "float32")
            header = self.header(payload, fragment_id=fragment.fragment_id, round=0, tokens=0, steps=0)
            assert self.push(header, payload).outcome in (pb.PushResponse.ACCEPTED, pb.PushResponse.DUPLICATE)
        until(lambda: self.shard.core.versions.all_seeded, "all fragments are seeded")

    def header(self, payload: Payload, **changes: Any) -> PushHeader:
        """The right header of a contribution, unless a change is asked for."""
        header = PushHeader(
            fragment_id=0, round=1, epoch=self.identity.epoch, base_version=0, tokens=100, steps=4,
            payload=payload.header, manifest_digest=self.manifest.digest,
        )  # fmt: skip
        return replace(header, **changes)


def contribution(value: float = 0.01, encoding: str = "int8") -> Payload:
    """The encoded pseudo-gradient of the fragment: the same value everywhere."""
    return encode_payload(torch.full((NUM_ELEMENTS,), value), encoding, chunk_elements=CHUNK_ELEMENTS)


def refusal(call: Callable[[], Any]) -> Refused:
    """How the shard refuses a call; raises AssertionError if it does not."""
    try:
        answer = call()
    except grpc.aio.AioRpcError as error:
        trailing = {key: str(value) for key, value in error.trailing_metadata() or ()}
        return Refused(error.code(), trailing.get(rpc.CODE_KEY, ""), error.details() or "")
    raise AssertionError(f"not refused: {answer}")
