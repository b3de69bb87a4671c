"""Join, Attend, Pull, Leave and health over loopback: what they answer, refuse, and survive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from in_process import NUM_ELEMENTS, TENSORS, Caller, InProcessShard, refusal, settings_with

from diloco_common.codec import Payload, PayloadHeader, decode_payload
from diloco_common.errors import ConfigError, InUse
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.manifest import TensorSpec
from diloco_common.wire.messages import PROTOCOL, Drain, Evicted, JoinRequest, Pulse
from diloco_server.shell import health
from secret_files import secret_file
from waiting import until

STATUS = grpc.StatusCode
TOKEN = "0123456789abcdef-secret"


def joined(shard: InProcessShard, learner_id: str = "a") -> Caller:
    caller = shard.caller(learner_id)
    caller.join()
    return caller


@pytest.fixture
def shard(serve, clock) -> InProcessShard:
    return serve(settings_with(), clock)


@pytest.fixture
def a(shard) -> Caller:
    return joined(shard)


def test_join_answers_the_lease_the_cut_and_the_policy(serve, clock):
    shard = serve(settings_with(sync={"push": "int4"}), clock)
    answer = shard.caller("a").join()
    assert (answer.generation, answer.epoch, answer.heartbeat_s) == (1, shard.core.epoch, 0.2)
    assert (answer.shard_index, answer.num_shards, answer.num_fragments) == (0, 1, 1)
    assert answer.manifest_digest == shard.caller().manifest.digest
    assert answer.policy.push_encoding == "int4"
    assert [s.seeded for s in answer.fragments] == [False]
    assert not answer.tensors


def test_a_proxy_of_the_environment_catches_no_call_to_this_machine(shard, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    assert shard.caller("a").join().generation == 1


@pytest.mark.parametrize(
    ("join", "status", "code", "words"),
    [
        ({"protocol": 2}, STATUS.FAILED_PRECONDITION, "PROTOCOL_MISMATCH", "speaks protocol 3, the caller 2"),
        ({"protocol": 4}, STATUS.FAILED_PRECONDITION, "PROTOCOL_MISMATCH", "speaks protocol 3, the caller 4"),
        ({"decodes": ["float32"]}, STATUS.INVALID_ARGUMENT, "UNKNOWN_ENCODING", "sync.pull"),
        ({"decodes": []}, STATUS.INVALID_ARGUMENT, "UNKNOWN_ENCODING", "the learner knows none"),
        ({"tensors": []}, STATUS.FAILED_PRECONDITION, "MANIFEST_MISMATCH", "no trainable elements"),
        ({"tensors": [TensorSpec("w", (0, 3))]}, STATUS.FAILED_PRECONDITION, "MANIFEST_MISMATCH", "no trainable"),
        ({"tensors": [TensorSpec("w", (3,))] * 2}, STATUS.FAILED_PRECONDITION, "MANIFEST_MISMATCH", "the same name"),
        (
            {"tensors": [TensorSpec("w", (-3,))]},
            STATUS.INVALID_ARGUMENT,
            "BAD_REQUEST",
            "the tensor 'w': Tensor.shape is -3",
        ),
        ({"tensors": [TensorSpec("", (3,))]}, STATUS.INVALID_ARGUMENT, "BAD_REQUEST", "Tensor.name has 0 characters"),
        ({"process_id": "x" * 65}, STATUS.INVALID_ARGUMENT, "BAD_REQUEST", "process_id has 65 characters; at most 64"),
        ({"observe": True}, STATUS.FAILED_PRECONDITION, "NOT_SEEDED", "try again later"),
    ],
)
def test_join_refuses_what_cannot_work(shard, join, status, code, words):
    found = refusal(lambda: shard.caller("a").join(**join))

    assert (found.status, found.code) == (status, code)
    assert words in found.words
    assert shard.core.membership.all() == []
    assert shard.core.manifest is None
    assert shard.metric("refused_calls_total", code=code) == 1


def test_an_observer_sees_the_model_and_pulls_without_a_lease(shard):
    joined(shard).seed(0.25)
    observer = shard.caller("")

    answer = observer.join([], observe=True)
    header, chunks = observer.pull(encodings=["float32"])

    assert answer.generation == 0
    assert tuple(protobuf.tensors_from_pb(answer.tensors)) == TENSORS
    values = torch.empty(NUM_ELEMENTS)
    decode_payload(Payload(protobuf.from_pb(PayloadHeader, header.payload), tuple(chunks)), values)
    assert values.eq(0.25).all()
    assert [m.learner_id for m in shard.core.membership.all()] == ["a"]


BAD_IDS = {
    "a path": "../../etc/passwd", "10 kB": "x" * 10_000, "65 characters": "x" * 65, "a space": "a b",
    "a label breaker": 'a",code="x', "a comma": "a,b",
}  # fmt: skip


@pytest.mark.parametrize("learner_id", BAD_IDS.values(), ids=BAD_IDS)
def test_a_learner_id_that_is_not_plain_is_refused_and_shown_nowhere(shard, written, learner_id):
    found = refusal(lambda: shard.caller(learner_id).join())
    assert (found.status, found.code) == (STATUS.INVALID_ARGUMENT, "BAD_REQUEST")
    assert "1 to 64 of" in found.words
    assert len(found.words) < 200
    assert shard.core.membership.all() == []
    assert max(map(len, written.getvalue().splitlines())) < 600
    labels = {v for f in shard.server.host.metrics.registry.collect() for s in f.samples for v in s.labels.values()}
    assert not any(learner_id[:20] in label for label in labels)


@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1]])
def test_without_the_token_every_call_is_refused(serve, clock, tmp_path, written, token):
    shard = serve(settings_with(security={"token_file": secret_file(tmp_path / "token", TOKEN)}), clock)
    right = shard.caller("a", token=TOKEN)
    right.join()
    right.seed()
    before = shard.state()
    intruder = shard.caller("a", token=token)
    intruder.identity = right.identity
    for call in (
        intruder.join, lambda: intruder.attend().ends(), lambda: intruder.push_messages([], hold=True),
        intruder.pull, intruder.leave,
    ):  # fmt: skip
        how = refusal(call)
        assert (how.status, how.code) == (STATUS.UNAUTHENTICATED, "UNAUTHENTICATED")
        assert ("set security.token_file" if token is None else "check security.token_file") in how.words
        assert TOKEN not in how.words

    assert (shard.state(), shard.member_state("a")) == (before, "alive")
    assert shard.metric("refused_calls_total", code="UNAUTHENTICATED") >= 5
    assert TOKEN not in written.getvalue()


@pytest.mark.parametrize("security", [{}, {"token_file": "absent"}], ids=["nothing", "a token in plaintext"])
def test_an_open_address_needs_certificates_or_consent(loop, security):
    open_everywhere = settings_with(shard={"listen": "0.0.0.0:0"}, security=security)
    with pytest.raises(ConfigError, match=r"diloco certs init.*security\.tls.*security\.insecure"):
        InProcessShard(loop, open_everywhere).start()


def test_a_port_that_is_taken_is_refused(serve, loop):
    taken = serve().address
    with pytest.raises(InUse, match=taken.rpartition(":")[2]):
        InProcessShard(loop, settings_with(shard={"listen": taken})).start()


def test_every_call_of_another_run_is_refused(shard):
    foreign = shard.caller("a", run_id="other")

    for call in (foreign.join, foreign.pull, foreign.leave, lambda: foreign.attend().ends()):
        found = refusal(call)
        assert (found.status, found.code) == (STATUS.FAILED_PRECONDITION, "WRONG_RUN")
        assert "check run.id" in found.words


@pytest.mark.parametrize("change", [{"generation": 0}, {"generation": 5}, {"epoch": 5}])
def test_attend_without_a_lease_is_refused(a, change):
    a.identity = replace(a.identity, **change)
    found = refusal(lambda: a.attend().ends())
    assert (found.status, found.code) == (STATUS.FAILED_PRECONDITION, "NOT_JOINED")


def heard(shard: InProcessShard, what: Any) -> None:
    until(lambda: what(shard.core.membership.get("a")), "the report is heard")


def test_heartbeats_without_steps_evict_nobody(serve, clock):
    """Fault 17."""
    shard = serve(settings_with(), clock)
    stream = joined(shard).attend()
    for _ in range(24):
        clock.now += 1.5
        stream.say(0)
        heard(shard, lambda member: member.last_heard == clock.now)
        assert shard.core.membership.get("a").live
    until(lambda: shard.member_state("a") == "stalled", "a is stalled, not dead")


def test_a_shard_that_ends_tells_its_learners(shard):
    stream = joined(shard).attend()
    stream.hear(Pulse)
    refused = shard.caller("b")

    shard.loop.run(shard.server.host.drain(1.0))
    found = refusal(refused.join)
    assert (found.status, found.code) == (STATUS.UNAVAILABLE, "DRAINING")
    shard.loop.look(shard.server.host.close)

    assert stream.hear(Drain) == Drain()
    assert stream.ends()


def test_pull_answers_with_a_header_alone_where_the_caller_has_the_version(a, shard):
    a.seed()

    fresh, chunks = a.pull()
    known, nothing = a.pull(have_version=0)
    a.identity = replace(a.identity, generation=0, epoch=a.identity.epoch + 1)  # an observer of another life
    other_life, again = a.pull(have_version=0)

    assert (fresh.version, fresh.payload.encoding, len(chunks)) == (0, "bfloat16", 1)
    assert (known.version, known.HasField("payload"), nothing) == (0, False, [])
    assert (other_life.HasField("payload"), len(again)) == (True, 1)
    assert shard.metric("sent_bytes_total") == 2 * 2 * NUM_ELEMENTS


@pytest.mark.parametrize(
    ("pull", "status", "code", "words"),
    [
        ({"fragment_id": 7}, STATUS.NOT_FOUND, "UNKNOWN_FRAGMENT", "owns fragments 0, not 7"),
        ({"encodings": ["int4", "zip"]}, STATUS.INVALID_ARGUMENT, "UNKNOWN_ENCODING", "bfloat16 or float32"),
    ],
)
def test_pull_refuses_what_is_not_there(a, shard, pull, status, code, words):
    a.seed()

    found = refusal(lambda: a.pull(**pull))

    assert (found.status, found.code) == (status, code)
    assert words in found.words


def test_health_says_serving_until_the_end(shard):
    channel = shard.caller().channel
    stub = health_pb2_grpc.HealthStub(channel)

    async def check(service: str) -> Any:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    names = ("", "diloco.v1.ParameterServer")
    assert [shard.loop.run(check(n)) for n in names] == [health_pb2.HealthCheckResponse.SERVING] * 2
    shard.loop.look(lambda: shard.server._health.set(health_pb2.HealthCheckResponse.NOT_SERVING))
    assert [shard.loop.run(check(n)) for n in names] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
    assert refusal(lambda: shard.loop.run(check("nobody"))).status == STATUS.NOT_FOUND
    assert refusal(lambda: shard.loop.run(check("x" * 2000))).code == "BAD_REQUEST"


def watch(shard: InProcessShard, service: str = "") -> Any:
    """An open Watch of its own connection, and how to hear the next thing that it says."""
    channel = shard.caller().channel

    async def begin() -> Any:
        return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))

    call = shard.loop.run(begin())

    async def hear() -> Any:
        message = await call.read()
        return None if message is rpc.EOF else message.status

    return call, lambda: shard.loop.run(hear())


def test_one_host_has_four_watches(shard):
    (first, hear), *others = [watch(shard) for _ in range(4)]
    assert {hear(), *(other() for _, other in others)} == {health_pb2.HealthCheckResponse.SERVING}

    assert refusal(watch(shard)[1]).code == "BUSY"
    shard.loop.look(first.cancel)
    until(lambda: shard.loop.look(lambda: len(shard.server._health._watches)) < 4, "its place is free")
    assert watch(shard)[1]() == health_pb2.HealthCheckResponse.SERVING


def test_watches_have_a_bound_and_an_end(serve, clock, monkeypatch):
    monkeypatch.setattr(health, "STREAMS_MAX", 1)
    monkeypatch.setattr(health, "WATCH_S", 0.2)
    shard = serve(settings_with(), clock)
    _, hear = watch(shard)
    assert hear() == health_pb2.HealthCheckResponse.SERVING
    assert hear() is None, "it ends"

    monkeypatch.setattr(health, "WATCH_S", 600.0)
    _, hear = watch(shard)
    assert hear() == health_pb2.HealthCheckResponse.SERVING
    assert refusal(watch(shard)[1]).code == "BUSY"


@pytest.mark.parametrize("method", ["Join", "Attend", "Push", "Pull", "Leave"])
def test_bytes_that_are_no_message_end_the_call_and_nothing_else(a, shard, method):
    a.seed()
    before = shard.state()

    async def garbage() -> None:
        call = a.channel.stream_stream(f"/diloco.v1.ParameterServer/{method}")(metadata=a.metadata(), timeout=120)
        await call.write(b"\xff" * 100)
        await call.done_writing()
        async for _ in call:
            pass

    found = refusal(lambda: shard.loop.run(garbage()))

    assert (found.status, found.code) == (STATUS.INVALID_ARGUMENT, "BAD_REQUEST")
    assert shard.state() == before
    assert a.pull()[0].version == 0


def test_the_older_process_is_told_even_if_the_newer_attends_at_once(shard):
    old = joined(shard).attend()
    old.hear(Pulse)
    newer = shard.caller("a")

    def both_at_once() -> None:
        # As when Join and Attend of the newer come before the older's stream is written to.
        host = shard.server.host
        caller = Identity(host.settings.run.id, "a")
        answer = host.join(caller, JoinRequest(PROTOCOL, "process that started later", TENSORS))
        host.attend(replace(caller, generation=answer.generation, epoch=answer.epoch))

    newer.loop.look(both_at_once)

    assert old.hear(Evicted).code == "SUPERSEDED"
