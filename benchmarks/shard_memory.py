"""How much memory a shard takes: a real server process, learners that only push and pull, peak RSS from the kernel.

    python benchmarks/shard_memory.py                  # 100 M parameters, 4 learners, 24 fragments: about a minute
    python benchmarks/shard_memory.py --json

The learners seed all fragments at once, as real ones do that start together. Then a round of every fragment is opened,
and all learners but one contribute to all of them before the last one does: as much as can be held is held.

    (peak RSS - idle RSS - most bytes of accepted contributions of rounds not yet merged) / parameters  <  12 bytes

Exits with 1 if it is not. Needs Linux, and about 2.5 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import torch

from diloco_common import rpc
from diloco_common.codec import Payload, encode_payload
from diloco_common.endpoints import Endpoints, read_address
from diloco_common.errors import Busy
from diloco_common.manifest import Fragment, Manifest, TensorSpec, cut
from diloco_common.messages import Collect, Committed, Progress, PushHeader
from diloco_protos import parameter_server_pb2 as pb
from diloco_protos import parameter_server_pb2_grpc as pb_grpc
from diloco_worker.link import SEEDS_AT_ONCE

BYTES_PER_PARAMETER_MAX = 12.0
LAYERS, WIDTH = 10, 768
TOKENS_PER_STEP = 1000
CALL_S = 300.0
RETRY_S = 0.2
MB = 1e6


def tensors_of(parameters: int) -> tuple[TensorSpec, ...]:
    """A transformer of about this size: whole layers, and an embedding that takes the rest."""
    layer = [
        ("qkv", (3 * WIDTH, WIDTH)),
        ("out", (WIDTH, WIDTH)),
        ("up", (4 * WIDTH, WIDTH)),
        ("down", (WIDTH, 4 * WIDTH)),
    ]
    tensors = [TensorSpec(f"layers.{i}.{name}.weight", shape) for i in range(LAYERS) for name, shape in layer]
    rest = parameters - sum(t.num_elements for t in tensors)
    return (TensorSpec("embedding.weight", (max(1, rest // WIDTH), WIDTH), mean_merge=True), *tensors)


class ShardProcess:
    """A shard on free ports, and what the kernel says of its memory."""

    def __init__(self, process: subprocess.Popen[bytes], address: Endpoints) -> None:
        self.address = address.grpc
        self._pid = process.pid

    def rss_bytes(self, line: str = "VmRSS") -> int:
        """Resident memory now; "VmHWM": the most that it ever was."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        found = re.search(rf"^{line}:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024


@contextmanager
def running_shard(*settings: str) -> Iterator[ShardProcess]:
    with tempfile.TemporaryDirectory() as folder:
        address_file = Path(folder, "shard.json")
        command = [sys.executable, "-m", "diloco_common.child", str(os.getpid()), "diloco_server"]
        flags = [f"--set={setting}" for setting in settings]
        process = subprocess.Popen([*command, f"--address-file={address_file}", *flags], stderr=subprocess.DEVNULL)
        try:
            while (address := read_address(address_file)) is None:
                if process.poll() is not None:
                    sys.exit("the shard did not start")
            yield ShardProcess(process, address)
        finally:
            process.kill()
            process.wait()


class Accepted:
    """Bytes of contributions that were accepted and are in no announced version yet: now, and the most there were."""

    def __init__(self) -> None:
        self.most = 0
        self._bytes: Counter[tuple[int, int]] = Counter()  # (fragment, round)

    def add(self, fragment_id: int, round_number: int, num_bytes: int) -> None:
        self._bytes[fragment_id, round_number] += num_bytes
        self.most = max(self.most, self._bytes.total())

    def announced(self, fragment_id: int, version: int) -> None:
        self._bytes.pop((fragment_id, version), None)


class LightLearner:
    """Speaks for a learner that trains nothing: contributes noise when it is asked to, and pulls every version."""

    def __init__(self, learner_id: str, address: str, manifest: Manifest, accepted: Accepted) -> None:
        self.manifest = manifest
        self._accepted = accepted
        self._identity = rpc.Identity("local", learner_id)
        channels = [grpc.aio.insecure_channel(address, options=rpc.CHANNEL_OPTIONS) for _ in range(2)]
        self._control, self._bulk = (pb_grpc.ParameterServerStub(c) for c in channels)  # type: ignore[no-untyped-call]
        self.collects: asyncio.Queue[Collect] = asyncio.Queue()
        self._versions: dict[int, int] = {}
        self._committed = asyncio.Condition()
        self._pulls: set[asyncio.Task[None]] = set()

    async def join(self) -> None:
        request = pb.JoinRequest(
            protocol=rpc.PROTOCOL, instance=self._identity.learner_id,
            tensors=rpc.tensors_to_pb(self.manifest.tensors), decodes=rpc.DECODES,
        )  # fmt: skip
        answer = await self._control.Join(request, metadata=self._identity.metadata(None), timeout=CALL_S)
        self._identity = rpc.Identity("local", self._identity.learner_id, answer.generation, answer.epoch)
        self._stream = self._control.Attend(metadata=self._metadata)
        self._listening = asyncio.create_task(self._listen())
        await self.step(0)

    async def step(self, inner_step: int) -> None:
        """Say that it has trained so far."""
        self._inner_step = inner_step
        await self._stream.write(rpc.progress_to_pb(Progress(inner_step, inner_step * TOKENS_PER_STEP)))

    async def seed(self, seeds: Sequence[tuple[Fragment, Payload]]) -> None:
        """Offer version 0 of every fragment, as a learner does: a few at once, again while the shard is busy."""
        at_once = asyncio.Semaphore(SEEDS_AT_ONCE)

        async def offer(fragment: Fragment, payload: Payload) -> None:
            async with at_once:
                while fragment.fragment_id not in self._versions:
                    try:
                        await self._push(fragment, payload, round_number=0, tokens=0, steps=0)
                        break
                    except grpc.aio.AioRpcError as error:
                        refusal = rpc.refusal_of(error)
                        if refusal is not None and not isinstance(refusal, Busy):
                            raise refusal from None
                        await asyncio.sleep(RETRY_S)

        await asyncio.gather(*(offer(*seed) for seed in seeds))

    async def contribute_to(self, rounds: int) -> None:
        """Contribute noise to so many rounds, one after the other."""
        for _ in range(rounds):
            collect = await self.collects.get()
            fragment = self.manifest.fragments[collect.fragment_id]
            payload = noise(fragment, 0.001, "int8")
            await self._push(fragment, payload, collect.round, self._inner_step * TOKENS_PER_STEP, self._inner_step)
            self._accepted.add(collect.fragment_id, collect.round, payload.header.num_bytes)

    async def pulled(self, version: int) -> None:
        """Wait until it has pulled this version of every fragment."""
        async with self._committed:
            await self._committed.wait_for(
                lambda: all(self._versions.get(f.fragment_id, -1) >= version for f in self.manifest.fragments)
            )
        await asyncio.gather(*self._pulls)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return self._identity.metadata(None)

    async def _push(self, fragment: Fragment, payload: Payload, round_number: int, tokens: int, steps: int) -> None:
        header = PushHeader(
            fragment.fragment_id, round_number, self._identity.epoch, max(0, round_number - 1), tokens, steps,
            payload.header, self.manifest.digest,
        )  # fmt: skip
        answer = await self._bulk.Push(rpc.push_requests(header, payload), metadata=self._metadata, timeout=CALL_S)
        outcome = rpc.answer_from_pb(answer).outcome.value
        assert outcome in ("accepted", "duplicate"), answer

    async def _listen(self) -> None:
        heartbeat = asyncio.create_task(self._beat())
        try:
            while (message := await self._stream.read()) is not rpc.EOF:
                match rpc.directive_from_pb(message):
                    case Collect() as collect:
                        self.collects.put_nowait(collect)
                    case Committed() as committed:
                        self._accepted.announced(committed.fragment_id, committed.version)
                        pull = asyncio.create_task(self._pull(committed.fragment_id))
                        self._pulls.add(pull)
                        pull.add_done_callback(self._pulls.discard)
                        async with self._committed:
                            self._versions[committed.fragment_id] = committed.version
                            self._committed.notify_all()
        finally:
            heartbeat.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.step(self._inner_step)

    async def _pull(self, fragment_id: int) -> None:
        request = pb.PullRequest(fragment_id=fragment_id)
        async for _ in self._bulk.Pull(request, metadata=self._metadata, timeout=CALL_S):
            pass


def noise(fragment: Fragment, scale: float, encoding: str) -> Payload:
    return encode_payload(torch.randn(fragment.num_elements).mul_(scale), encoding)


async def load(shard: ShardProcess, manifest: Manifest, learners: int, rounds: int) -> Accepted:
    """Seed and contribute as described above."""
    accepted = Accepted()
    all_learners = [LightLearner(f"learner-{i}", shard.address, manifest, accepted) for i in range(learners)]
    for learner in all_learners:
        await learner.join()
    seeds = [(fragment, noise(fragment, 0.02, "float32")) for fragment in manifest.fragments]
    await asyncio.gather(*(learner.seed(seeds) for learner in all_learners))
    seeds.clear()
    for version in range(rounds + 1):
        for learner in all_learners:
            await learner.pulled(version)
        if version == rounds:
            break
        for learner in all_learners:
            await learner.step((version + 1) * len(manifest.fragments))
        *most, last = all_learners
        await asyncio.gather(*(learner.contribute_to(len(manifest.fragments)) for learner in most))
        await last.contribute_to(len(manifest.fragments))
    return accepted


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the memory of a shard.")
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3, help="of every fragment")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)

    manifest = cut(tensors_of(args.parameters), args.fragments, 1)
    parameters = sum(fragment.num_elements for fragment in manifest.fragments)
    every = f"sync.sync_every={args.fragments}"
    # The learners share an event loop that also encodes: a lease must outlast that.
    lease = ("lease.lease_s=300", "lease.heartbeat_s=1")
    with running_shard(f"sync.fragments={args.fragments}", every, "sync.quorum=all", *lease) as shard:
        idle = shard.rss_bytes()
        accepted = asyncio.run(load(shard, manifest, args.learners, args.rounds))
        peak = shard.rss_bytes("VmHWM")
    own = (peak - idle - accepted.most) / parameters
    result = {
        "parameters": parameters, "learners": args.learners, "fragments": args.fragments, "rounds": args.rounds,
        "idle_bytes": idle, "peak_bytes": peak, "open_contribution_bytes": accepted.most,
        "bytes_per_parameter": round(own, 3), "bytes_per_parameter_max": BYTES_PER_PARAMETER_MAX,
    }  # fmt: skip
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{parameters / 1e6:.1f} M parameters, {args.learners} learners, {args.fragments} fragments")
        print(f"idle shard                    {idle / MB:8.0f} MB")
        print(f"peak                          {peak / MB:8.0f} MB")
        print(f"contributions of open rounds  {accepted.most / MB:8.0f} MB")
        print(f"the rest, per parameter       {own:8.2f} bytes (must be below {BYTES_PER_PARAMETER_MAX:g})")
    return 0 if own < BYTES_PER_PARAMETER_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
