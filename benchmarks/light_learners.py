"""Runs shard processes, and learners so light that a benchmark measures only the shard.

To the shard, a light learner looks like a real one. It has three channels, joins, reports its inner steps and offers
seeds. It contributes when asked (a few pushes at once, repeated while the shard is busy), and pulls every announced
version in turn. But it does not train, encode or decode. Its contributions are noise, encoded once for all learners,
and it only counts the pulled bytes. So hundreds of light learners share one event loop.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import torch

from diloco_common.codec import Payload, encode_payload
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.addresses import Endpoints, read_address
from diloco_common.wire.calls import backoff_s
from diloco_common.wire.manifest import Fragment, Manifest, TensorSpec
from diloco_common.wire.messages import (
    PROTOCOL,
    TRANSFERS_AT_ONCE,
    Collect,
    Committed,
    Evicted,
    Progress,
    PullHeader,
    PushHeader,
)
from diloco_protos import parameter_server_pb2 as pb
from diloco_protos import parameter_server_pb2_grpc as pb_grpc
from diloco_worker.core.connection import TRY_AGAIN
from diloco_worker.shell.pusher import SEEDS_IN_FLIGHT

TOKENS_PER_STEP = 1000
CALL_S = 300.0
ATTEMPTS_MAX = 50
"""Maximum number of attempts of a push, in about two minutes. After them, a lost shard ends the benchmark."""
LAYERS, WIDEST = 10, 768
SCHEDULER_CLOCK = 2
"""Clock id for the CPU time of a process on Linux; see clock_getcpuclockid(3)."""


# ------------------------------------------------------------ the model


def tensors_of(parameters: int) -> tuple[TensorSpec, ...]:
    """A transformer of about this size: 10 layers, at most 768 wide, and an embedding with the other parameters."""
    width = max(16, min(WIDEST, int(math.sqrt(0.75 * parameters / (12 * LAYERS))) // 16 * 16))
    layer = [
        ("qkv", (3 * width, width)),
        ("out", (width, width)),
        ("up", (4 * width, width)),
        ("down", (width, 4 * width)),
    ]
    tensors = [TensorSpec(f"layers.{i}.{name}.weight", shape) for i in range(LAYERS) for name, shape in layer]
    rest = parameters - sum(t.num_elements for t in tensors)
    return (TensorSpec("embedding.weight", (max(1, rest // width), width), rule="mean"), *tensors)


def noise_of(fragments: Sequence[Fragment], scale: float, encoding: str) -> dict[int, Payload]:
    """Fragment id -> noise in that encoding."""
    return {f.fragment_id: encode_payload(torch.randn(f.num_elements).mul_(scale), encoding) for f in fragments}


# ------------------------------------------------------------ the shard


class Member:
    """A shard on free ports, with its memory and CPU time from the kernel."""

    def __init__(self, process: subprocess.Popen[bytes], address: Endpoints) -> None:
        self.address = address.grpc
        self.pid = process.pid

    def rss_bytes(self, line: str = "VmRSS") -> int:
        """Resident memory now; with "VmHWM", its peak."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{line}:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far, user and system, with a resolution of nanoseconds."""
        return time.clock_gettime(~self.pid << 3 | SCHEDULER_CLOCK)


@contextmanager
def running_shard(*settings: str) -> Iterator[Member]:
    """A shard with these settings (key=value), killed at the end. Exits if it does not start."""
    with tempfile.TemporaryDirectory() as folder:
        address_file = Path(folder, "address.json")
        command = [sys.executable, "-m", "diloco_common.process", str(os.getpid()), "diloco_server"]
        flags = [f"--set={setting}" for setting in settings]
        process = subprocess.Popen([*command, f"--address-file={address_file}", *flags], stderr=subprocess.DEVNULL)
        try:
            while (address := read_address(address_file)) is None:
                if process.poll() is not None:
                    sys.exit(f"a process did not start: python -m diloco_server {' '.join(flags)} says why")
                time.sleep(0.05)
            yield Member(process, address)
        finally:
            process.kill()
            process.wait()


@contextmanager
def running_shards(count: int, *settings: str) -> Iterator[list[Member]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_shard(f"shard.count={count}", f"shard.index={i}", *settings))
            for i in range(count)
        ]


class Accepted:
    """Counts bytes of accepted contributions that are in no announced version yet: the current sum, and its maximum."""

    def __init__(self) -> None:
        self.most = 0
        self._bytes: Counter[tuple[int, int]] = Counter()  # (fragment, round)
        self._sum = 0

    def add(self, fragment_id: int, round_number: int, num_bytes: int) -> None:
        self._bytes[fragment_id, round_number] += num_bytes
        self._sum += num_bytes
        self.most = max(self.most, self._sum)

    def announced(self, fragment_id: int, version: int) -> None:
        self._sum -= self._bytes.pop((fragment_id, version), 0)


# ------------------------------------------------------------ the learner


class LightLearner:
    """A learner that does not train. Create it and use it inside one event loop."""

    def __init__(
        self, learner_id: str, shard: Member, manifest: Manifest, fragments: Sequence[Fragment],
        contributions: Mapping[int, Payload], accepted: Accepted,
    ) -> None:  # fmt: skip
        """`fragments`: those of this shard. `contributions`: fragment id -> the payload of each contribution."""
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self.fragments = fragments
        self._digest = manifest.digest
        self._tensors = manifest.tensors
        self._contributions = contributions
        self._accepted = accepted
        self._identity = Identity("local", learner_id)
        self._inner_step = 0
        self._writing = asyncio.Lock()  # a stream takes one message at a time
        self._channels = [
            grpc.aio.insecure_channel(shard.address, options=options)
            for options in (rpc.CHANNEL_OPTIONS, rpc.BULK_CHANNEL_OPTIONS, rpc.BULK_CHANNEL_OPTIONS)
        ]
        control, pushes, pulls = self._channels
        self._control = pb_grpc.ParameterServerStub(control)  # type: ignore[no-untyped-call]
        self._call_push = pushes.stream_unary(f"/{rpc.SERVICE}/Push", response_deserializer=pb.PushResponse.FromString)
        self._call_pull = pulls.unary_stream(f"/{rpc.SERVICE}/Pull", request_serializer=protobuf.serialize)
        self._collects: asyncio.Queue[Collect] = asyncio.Queue()
        self._announced: dict[int, int] = {}
        self._pulled: dict[int, int] = {}
        self._news = asyncio.Event()
        self._pulled_more = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ commands

    async def join(self) -> None:
        request = pb.JoinRequest(
            protocol=PROTOCOL, process_id=self._identity.learner_id,
            tensors=protobuf.tensors_to_pb(self._tensors), decodes=rpc.DECODES,
        )  # fmt: skip
        answer = await self._control.Join(request, metadata=rpc.metadata_of(self._identity, None), timeout=CALL_S)
        self._identity = Identity("local", self._identity.learner_id, answer.generation, answer.epoch)
        self._heartbeat_s = answer.heartbeat_s
        self._stream = self._control.Attend(metadata=self._metadata)
        self._tasks = [asyncio.create_task(work) for work in (self._listen(), self._beat(), self._pull_all())]
        await self.step(0)

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def step(self, inner_step: int) -> None:
        """Report this inner step; a heartbeat repeats the last report."""
        self._inner_step = inner_step
        async with self._writing:
            await self._stream.write(protobuf.progress_to_pb(Progress(inner_step, inner_step * TOKENS_PER_STEP)))

    async def seed(self, seeds: Mapping[int, Payload]) -> None:
        """Offer version 0 of every fragment, a few at once, unless another learner has seeded it."""
        at_once = asyncio.Semaphore(SEEDS_IN_FLIGHT)

        async def offer(fragment_id: int, payload: Payload) -> None:
            async with at_once:
                if fragment_id not in self._announced:
                    await self._push(fragment_id, payload, round_number=0, tokens=0, steps=0)

        await asyncio.gather(*(offer(*seed) for seed in seeds.items()))

    async def contribute_to(self, rounds: int) -> None:
        """Contribute to the next `rounds` rounds that ask for it, a few at once."""

        async def contribute() -> None:
            for _ in left:
                collect = await self._collects.get()
                payload = self._contributions[collect.fragment_id]
                tokens = self._inner_step * TOKENS_PER_STEP
                await self._push(collect.fragment_id, payload, collect.round, tokens, self._inner_step)
                self._accepted.add(collect.fragment_id, collect.round, payload.header.num_bytes)
                self.bytes_pushed += payload.header.num_bytes

        left = iter(range(rounds))
        await asyncio.gather(*(contribute() for _ in range(min(rounds, TRANSFERS_AT_ONCE))))

    async def pulled(self, version: int) -> None:
        """Wait until the learner has pulled this version of every fragment."""
        async with self._pulled_more:
            await self._pulled_more.wait_for(
                lambda: all(self._pulled.get(f.fragment_id, -1) >= version for f in self.fragments)
            )

    # ------------------------------------------------------------ helpers

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return rpc.metadata_of(self._identity, None)

    async def _push(self, fragment_id: int, payload: Payload, round_number: int, tokens: int, steps: int) -> None:
        """Push until there is an answer. Raises a Refusal or AioRpcError if a real learner would give up."""
        header = PushHeader(
            fragment_id, round_number, self._identity.epoch, max(0, round_number - 1), tokens, steps,
            payload.header, self._digest,
        )  # fmt: skip
        attempt = 0
        while True:
            try:
                requests = protobuf.push_requests(header, payload)
                answer = await self._call_push(requests, metadata=self._metadata, timeout=CALL_S)
                break
            except grpc.aio.AioRpcError as error:
                refusal = rpc.refusal_of(error)
                if attempt == ATTEMPTS_MAX or (refusal is not None and not isinstance(refusal, TRY_AGAIN)):
                    raise refusal or error from None
                await asyncio.sleep(backoff_s(attempt, random.random()))
                attempt += 1
        outcome = protobuf.answer_from_pb(answer).outcome.value
        assert outcome in ("accepted", "duplicate"), answer

    async def _listen(self) -> None:
        while (message := await self._stream.read()) is not rpc.EOF:
            match protobuf.directive_from_pb(message):
                case Collect() as collect:
                    self._collects.put_nowait(collect)
                case Committed() as committed:
                    self._accepted.announced(committed.fragment_id, committed.version)
                    self._announced[committed.fragment_id] = committed.version
                    self._news.set()
                case Evicted() as evicted:
                    sys.exit(f"{self._identity.learner_id} was evicted: {evicted.message}")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self.step(self._inner_step)

    async def _pull_all(self) -> None:
        """Pull one fragment after the other, always the newest version, as a learner does."""
        while True:
            await self._news.wait()
            self._news.clear()
            for fragment_id, version in sorted(self._announced.items()):
                if self._pulled.get(fragment_id) != version:
                    await self._pull(fragment_id)

    async def _pull(self, fragment_id: int) -> None:
        call = self._call_pull(pb.PullRequest(fragment_id=fragment_id), metadata=self._metadata, timeout=CALL_S)
        header = protobuf.pull_part(await call.read())
        assert isinstance(header, PullHeader)
        while (part := await call.read()) is not rpc.EOF:
            block = protobuf.pull_part(part)
            assert not isinstance(block, PullHeader)
            self.bytes_pulled += len(block)
        async with self._pulled_more:
            self._pulled[fragment_id] = header.version
            self._pulled_more.notify_all()
