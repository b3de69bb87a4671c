"""Callers that take what they can, beside a learner that trains: its rounds go on, and memory is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import psutil
import pytest
import torch
from in_process import NUM_ELEMENTS, InProcessShard, settings_with
from training import Training

from diloco_common.codec import encode_payload
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_deploy.health import main
from diloco_protos import parameter_server_pb2 as pb
from http2 import CALL, HalfCall
from waiting import until

RSS_MORE = 64 << 20
"""Bytes that an attack may cost at most."""
BODY = 7_900_000
"""Of a message that never ends: a little less than the largest."""
LEASE_S = 60.0
"""Long: a loaded machine must not evict the honest learner."""


class Memory:
    """RSS of this process, which the shard is a part of."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self.most = self._process.memory_info().rss

    def more(self) -> int:
        """Bytes that it grew by, at most, when it was asked."""
        self.most = max(self.most, self._process.memory_info().rss)
        return self.most - self._before


@pytest.fixture
def crowd() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def a_shard(serve: Callable[..., InProcessShard], **shard: object) -> InProcessShard:
    return serve(settings_with(lease={"lease_s": LEASE_S, "heartbeat_s": 0.2}, sync={"quorum": 1}, shard=shard))


def goes_on(shard: InProcessShard, training: Training) -> None:
    """Three more rounds become versions, with the learner's work in them."""
    version = shard.version()
    training.until(lambda: shard.version() >= version + 3, "three more versions")


def pour(calls: list[HalfCall], memory: Memory, ended: int) -> None:
    """Send what the shard takes, until it has ended so many of them."""

    def have_ended() -> bool:
        for call in calls:
            call.pour(BODY - 1 - call.sent)
        memory.more()
        return sum(call.is_over for call in calls) >= ended

    until(have_ended, f"{ended} calls to end", every_s=0.0)


def test_joins_without_an_end_cost_little_and_others_join_beside_them(serve, train, crowd) -> None:
    shard = a_shard(serve)
    honest = train(shard.address, "honest")
    goes_on(shard, honest)
    memory = Memory()
    calls = []
    for number in range(60):
        metadata = rpc.metadata_of(shard.caller(f"ghost-{number}").identity, None)
        calls.append(crowd.enter_context(closing(HalfCall(shard.address, f"{CALL}Join", metadata))))
        calls[-1].begin_message(BODY)
    pour(calls, memory, ended=8)
    train(shard.address, "late", seed=1)
    goes_on(shard, honest)
    assert memory.more() <= RSS_MORE
    assert sum(call.sent for call in calls) < 60 * BODY / 2, "few were read at all"


def test_questions_for_health_without_an_end_cost_little_and_others_ask_beside_them(serve, crowd) -> None:
    shard = a_shard(serve)
    memory = Memory()
    calls = []
    for number in range(60):
        method = ("Check", "Watch")[number % 2]
        calls.append(crowd.enter_context(closing(HalfCall(shard.address, f"/grpc.health.v1.Health/{method}", ()))))
        calls[-1].begin_message(BODY)
    pour(calls, memory, ended=40)
    assert main(["--grpc", shard.address]) == 0
    assert memory.more() <= RSS_MORE
    assert sum(call.sent for call in calls) < 60 * BODY / 2, "few were read at all"


def test_a_caller_of_another_run_sends_no_message(serve, crowd) -> None:
    shard = a_shard(serve)
    metadata = rpc.metadata_of(shard.caller("stranger", run_id="another").identity, None)
    calls = [crowd.enter_context(closing(HalfCall(shard.address, f"{CALL}Join", metadata))) for _ in range(20)]
    for call in calls:
        call.begin_message(BODY)

    def all_over() -> bool:
        return not sum(call.pour(BODY - 1 - call.sent) for call in calls) and all(call.is_over for call in calls)

    until(all_over, "the shard to refuse them all")
    assert sum(call.sent for call in calls) < 20 * BODY / 10


def test_pushes_without_bytes_take_nobodys_place(serve, train, crowd) -> None:
    shard = a_shard(serve, max_pushes=8)
    honest = train(shard.address, "honest")
    goes_on(shard, honest)
    mallory = shard.caller("mallory")
    mallory.join(shard.core.manifest.tensors)
    metadata = mallory.metadata()
    calls = [crowd.enter_context(closing(HalfCall(shard.address, f"{CALL}Push", metadata))) for _ in range(64)]
    until(lambda: sum(call.listen() or call.is_over for call in calls) >= 60, "all but four to be ended")
    goes_on(shard, honest)
    assert sum(call.listen() or not call.is_over for call in calls) == 4
    assert shard.metric("refused_calls_total", code="TORN_UPLOAD") >= 60


def test_a_learner_whose_connection_broke_pushes_at_once(serve) -> None:
    shard = a_shard(serve, max_pushes=1)
    ann = shard.caller("ann")
    ann.join()
    payload = encode_payload(torch.full((NUM_ELEMENTS,), 0.5), "float32")
    seed = ann.header(payload, round=0, tokens=0, steps=0)

    async def ghost() -> object:
        """Its header came, and nothing more: nobody has told the shard that the connection broke."""
        call = ann.stub.Push(metadata=ann.metadata())
        await call.write(pb.PushRequest(header=protobuf.to_pb(seed)))
        return call

    call = shard.loop.run(ghost())
    until(lambda: shard.loop.look(lambda: shard.server.service._pushes.bytes_held), "the header")
    assert ann.push(seed, payload).outcome == pb.PushResponse.ACCEPTED

    async def ended() -> str:
        return str(await call.details())

    assert "a later push of this learner came" in shard.loop.run(ended())


def test_pulls_that_read_only_the_header_cost_little(serve, crowd) -> None:
    shard = a_shard(serve)
    tensors = (TensorSpec("w", (8_000_000,)),)
    ann = shard.caller("ann")
    ann.manifest = cut(tensors, 1, 1)
    ann.join(tensors)
    values = encode_payload(torch.zeros(8_000_000), "float32")
    ann.push(ann.header(values, round=0, tokens=0, steps=0), values)
    until(lambda: shard.core.versions.all_seeded, "version 0")
    stream = ann.attend()
    memory = Memory()
    metadata = [*rpc.metadata_of(shard.caller("").identity, None), ("grpc-timeout", "60S")]
    calls = [crowd.enter_context(closing(HalfCall(shard.address, f"{CALL}Pull", metadata))) for _ in range(256)]
    for call in calls:
        call.begin_message(0)
    until(lambda: sum(call.listen() or call.is_over for call in calls) >= 252, "all but four to be refused")
    assert memory.more() <= RSS_MORE
    stream.say(0)
    header, chunks = ann.pull()
    assert (header.version, sum(map(len, chunks))) == (0, 2 * 8_000_000), "a learner is not in their account"


def test_a_pull_without_a_deadline_is_refused(serve) -> None:
    shard = a_shard(serve)
    ann = shard.caller("ann")
    ann.join()
    ann.seed()

    async def pull() -> str:
        call = ann.stub.Pull(pb.PullRequest(), metadata=ann.metadata())
        return str(await call.details())

    assert "must have a deadline" in shard.loop.run(pull())
    assert ann.pull()[0].version == 0
