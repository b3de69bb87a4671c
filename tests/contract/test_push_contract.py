"""Push over loopback: what counts, what is refused, and that a refusal changes nothing but its count."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from in_process import (
    CHUNK_ELEMENTS,
    DEADLINE_S,
    NUM_ELEMENTS,
    Attendance,
    Caller,
    Clock,
    InProcessShard,
    Refused,
    contribution,
    refusal,
    settings_with,
)

from builders import chunk_request
from diloco_common.codec import Payload, PayloadHeader, chunks_crc32c
from diloco_common.wire import bounds, protobuf, rpc
from diloco_common.wire.messages import Collect, Committed, PushHeader, Range
from diloco_protos import parameter_server_pb2 as pb
from waiting import until

ACCEPTED, DUPLICATE = pb.PushResponse.ACCEPTED, pb.PushResponse.DUPLICATE
LATE, REJECTED = pb.PushResponse.LATE, pb.PushResponse.REJECTED
STATUS = grpc.StatusCode


class OpenRound:
    """A shard whose only fragment collects round 1 from the learners a and b; it closes when both contributed."""

    def __init__(self, shard: InProcessShard) -> None:
        self.shard = shard
        self.a, self.b = shard.caller("a"), shard.caller("b")
        for learner in (self.a, self.b):
            learner.join()
        self.a.seed(0.5)
        self.streams: tuple[Attendance, ...] = (self.a.attend(), self.b.attend())
        for stream in self.streams:  # "all" are those that have reported
            stream.say(0)
        members = shard.core.membership
        until(lambda: shard.loop.look(lambda: all(m.first_step is not None for m in members.all())), "reports")
        self.reach(1)

    def reach(self, round_number: int) -> None:
        """Both take the step that the next round waits for."""
        for step in (round_number - 1, round_number):
            for stream in self.streams:
                stream.say(step, tokens=100 * step)
        for stream in self.streams:
            assert stream.hear(Collect).round == round_number

    def push(self, learner: Caller, payload: Payload | None = None, **changes: Any) -> pb.PushResponse:
        payload = payload or contribution()
        return learner.push(learner.header(payload, **changes), payload)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self.shard.state()
        yield
        assert self.shard.state() == before

    def rejects(self, push: Callable[[], pb.PushResponse], code: str, words: str = "") -> None:
        """It changes nothing but its count, and the round still wants the right one."""
        with self.unchanged():
            answer = push()
        assert (answer.outcome, answer.code) == (REJECTED, code)
        assert words in answer.message
        assert self.shard.ledger.rejected == {code: 1}
        assert self.shard.metric("contributions_rejected_total", code=code) == 1
        assert self.push(self.a, contribution(0.02, self.shard.settings.sync.push)).outcome == ACCEPTED


def theta(shard: InProcessShard) -> torch.Tensor:
    return torch.frombuffer(bytearray(shard.state().theta[0]), dtype=torch.float32)


@pytest.fixture
def opened(serve, clock: Clock) -> OpenRound:
    return OpenRound(serve(settings_with(), clock))


def messages(header: PushHeader | None, *chunks: bytes) -> list[pb.PushRequest]:
    first = [] if header is None else [pb.PushRequest(header=protobuf.to_pb(header))]
    return first + [chunk_request(chunk) for chunk in chunks]


def test_a_round_becomes_a_version_once_all_have_contributed(opened):
    shard = opened.shard

    assert opened.push(opened.a, contribution(0.1, "int8")).outcome == ACCEPTED
    assert shard.version() == 0
    assert opened.push(opened.b, contribution(0.3, "int8"), tokens=100).outcome == ACCEPTED

    committed = opened.streams[0].hear(Committed)
    while committed.version == 0:  # the announcement of the seed
        committed = opened.streams[0].hear(Committed)
    assert (committed.version, committed.epoch) == (1, shard.core.epoch)
    _, chunks = opened.a.pull(encodings=["float32"])
    values = torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.float32)
    assert torch.allclose(values, torch.full((NUM_ELEMENTS,), 0.5 - 0.2), atol=2e-3)  # lr 1: theta - mean(delta)
    assert shard.ledger.tokens_merged == 200
    assert shard.metric("contributions_total", outcome="accepted") == 2  # the seed is no contribution


REFUSED_BY_HEADER: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("another manifest", {"manifest_digest": "f" * 32}, {}, "MANIFEST_MISMATCH", "join again"),
    ("a round that never opened", {"round": 9}, {}, "WRONG_ROUND", "round 9 is not open"),
    ("more elements than the fragment", {}, {"num_elements": 10**15}, "BAD_PAYLOAD", "the fragment 605"),
    ("an unknown encoding", {}, {"encoding": "zip\x1b[31m"}, "UNKNOWN_ENCODING", "send int8"),
]


@pytest.mark.parametrize(
    ("changes", "payload_changes", "code", "words"),
    [case[1:] for case in REFUSED_BY_HEADER],
    ids=[case[0] for case in REFUSED_BY_HEADER],
)
def test_a_push_is_refused_by_its_header_alone(opened, written, changes, payload_changes, code, words):
    payload = contribution()
    header = replace(opened.a.header(payload), payload=replace(payload.header, **payload_changes), **changes)
    received = opened.shard.metric("received_bytes_total")

    opened.rejects(lambda: opened.a.push_messages(messages(header), hold=True), code, words)  # no chunk is ever sent

    taken = opened.shard.metric("received_bytes_total") - received
    assert taken == sum(map(len, payload.chunks)), "those of the right one, which came after it"
    assert opened.shard.ledger.tokens_refused[code] == header.tokens
    line = f"contribution refused learner=a fragment={header.fragment_id} round={header.round} code={code}"
    assert line in written.getvalue()
    assert "\x1b" not in written.getvalue()


def int8_payload(scale: float = 1e-3, code: int = 1, crc_off: int = 0) -> Payload:
    """int8 chunks written by hand, the scale and the code the same everywhere but in the first block."""
    chunks = []
    for start in range(0, NUM_ELEMENTS, CHUNK_ELEMENTS):
        count = min(CHUNK_ELEMENTS, NUM_ELEMENTS - start)
        first = start == 0
        chunks.append(struct.pack("<f", scale if first else 1e-3) + struct.pack("b", code if first else 1) * count)
    crc = chunks_crc32c(chunks) ^ crc_off
    header = PayloadHeader("int8", NUM_ELEMENTS, CHUNK_ELEMENTS, sum(map(len, chunks)), crc)
    return Payload(header, tuple(chunks))


def with_first(payload: Payload, *values: float) -> Payload:
    """A payload as float32, but for its first values."""
    chunks = (struct.pack(f"<{len(values)}f", *values) + payload.chunks[0][4 * len(values) :], *payload.chunks[1:])
    return Payload(replace(payload.header, chunks_crc32c=chunks_crc32c(chunks)), chunks)


def changed(change: Callable[[list[bytes]], list[bytes]]) -> Payload:
    """A right header with other chunks."""
    payload = int8_payload(code=2)
    return Payload(payload.header, tuple(change(list(payload.chunks))))


BAD_BYTES: list[tuple[str, Payload, str, str]] = [
    ("a wrong checksum", int8_payload(crc_off=1), "BAD_CHECKSUM", "changed on the way"),
    ("a flipped bit", changed(lambda c: [bytes([c[0][0] ^ 1]) + c[0][1:], *c[1:]]), "BAD_CHECKSUM", "crc32c"),
    ("a chunk too many", changed(lambda c: [*c, c[-1]]), "BAD_PAYLOAD", "there is no chunk 3"),
    ("a chunk too long", changed(lambda c: [c[0] + b"\0", *c[1:]]), "BAD_PAYLOAD", "chunk 0 of 3 takes 260 bytes"),
    ("chunks in another order", changed(lambda c: [c[1], c[0], c[2]]), "BAD_CHECKSUM", "crc32c"),
    ("a scale of 0 with codes", int8_payload(scale=0.0), "BAD_PAYLOAD", "scale"),
    ("the code -128", int8_payload(code=-128), "BAD_PAYLOAD", "-128"),
]


@pytest.mark.parametrize(
    ("payload", "code", "words"), [case[1:] for case in BAD_BYTES], ids=[case[0] for case in BAD_BYTES]
)
def test_bytes_that_are_not_the_announced_contribution_are_refused(opened, payload, code, words):
    opened.rejects(lambda: opened.push(opened.a, payload), code, words)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (float("nan"), "NOT_FINITE"),
        (float("inf"), "NOT_FINITE"),
        (1e30, "NOT_FINITE"),  # their squares overflow
    ],
)
def test_values_that_nothing_could_be_merged_with_are_refused(serve, clock, bad, code):
    """Fault 14."""
    opened = OpenRound(serve(settings_with(sync={"push": "float32"}), clock))
    payload = with_first(contribution(encoding="float32"), bad, bad)
    opened.rejects(lambda: opened.push(opened.a, payload), code)


@pytest.mark.parametrize(("value", "moved"), [(0.0, 0.0), (0.01, 0.01)])
def test_zeros_and_constants_are_merged_like_anything_else(serve, clock, value, moved):
    """Fault 14: there is nothing wrong with them, and what they make stays finite."""
    opened = OpenRound(serve(settings_with(sync={"push": "float32"}), clock))
    before = theta(opened.shard)

    for learner in (opened.a, opened.b):
        assert opened.push(learner, contribution(value, "float32")).outcome == ACCEPTED
    until(lambda: opened.shard.version() == 1, "version 1")

    after = theta(opened.shard)
    assert torch.allclose((after - before).abs(), torch.full_like(after, moved), atol=1e-6)


def test_the_lease_that_ends_while_the_bytes_come_fences_the_push(opened, clock):
    payload = contribution()
    header = opened.a.header(payload)
    shard = opened.shard

    async def torn() -> Any:
        call = opened.a.stub.Push(metadata=opened.a.metadata())
        sent = messages(header, *payload.chunks)
        received = shard.server.host.telemetry.bytes_pushed
        for message in sent[:-1]:
            await call.write(message)
        while shard.server.host.telemetry.bytes_pushed < received + len(payload.chunks[0]):
            await shard.server.host.work.compute("encode", lambda: None)
        clock.now += shard.settings.lease.lease_s + 1
        shard.server.host.advance()
        await call.write(sent[-1])
        await call.done_writing()
        return await call

    found = refusal(lambda: shard.loop.run(torn()))

    assert found.code == "LEASE_EXPIRED"
    assert shard.state().contributions == {0: ()}


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        pytest.param(messages(None, b"123"), "a push begins with its header", id="a chunk before the header"),
        pytest.param(
            [pb.PushRequest()], "PushRequest has neither a header nor a chunk with its crc32c", id="an empty message"
        ),
        pytest.param([], "a push begins with its header", id="nothing"),
    ],
)
def test_a_push_without_its_header_first_is_refused(opened, sent, says):
    with opened.unchanged():
        found = refusal(lambda: opened.a.push_messages(sent))
    assert found == Refused(STATUS.INVALID_ARGUMENT, "BAD_REQUEST", says)
    assert opened.shard.metric("refused_calls_total", code="BAD_REQUEST") >= 1


@pytest.mark.parametrize("tokens", [2**64 - 1, 2**62, bounds.TOKENS_MAX + 1])
def test_a_push_of_more_tokens_than_there_are_is_no_push(serve, clock, tokens):
    opened, payload = OpenRound(serve(settings_with(run={"tokens": 10**6}), clock)), contribution()
    with opened.unchanged():
        found = refusal(lambda: opened.push(opened.a, payload, tokens=tokens))
    assert (found.code, f"PushHeader.tokens is {tokens}" in found.words) == ("BAD_REQUEST", True)
    assert not opened.shard.core.done
    assert [opened.push(learner).outcome for learner in (opened.a, opened.b)] == [ACCEPTED] * 2


def test_a_contribution_that_comes_whole_has_no_ranges(opened):
    opened.rejects(lambda: opened.push(opened.a, ranges=(Range(0, NUM_ELEMENTS),)), "BAD_PAYLOAD")


def test_a_chunk_without_its_checksum_is_refused(opened):
    payload = contribution()
    sent = messages(opened.a.header(payload), *payload.chunks)
    sent[1].ClearField("crc32c")
    opened.rejects(lambda: opened.a.push_messages(sent), "BAD_REQUEST", "nor a chunk with its crc32c")


def test_a_second_header_is_refused(opened):
    payload = contribution()
    header = opened.a.header(payload)
    sent = messages(header, payload.chunks[0]) + messages(header)
    opened.rejects(lambda: opened.a.push_messages(sent, hold=True), "BAD_REQUEST", "chunks only")


def test_a_push_that_is_cut_off_in_the_middle_leaves_no_trace(opened):
    payload = contribution()
    sent = messages(opened.a.header(payload), *payload.chunks[:2])
    service_pushes = opened.shard.metric("received_bytes_total")

    async def cut_off() -> None:
        call = opened.a.stub.Push(metadata=opened.a.metadata())
        for message in sent:
            await call.write(message)
        while opened.shard.metric("received_bytes_total") < service_pushes + sum(map(len, payload.chunks[:2])):
            await opened.shard.server.host.work.compute("encode", lambda: None)
        call.cancel()

    with opened.unchanged():
        opened.shard.loop.run(cut_off())
    assert opened.push(opened.a, payload).outcome == ACCEPTED  # the whole of it, again


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_a_push_that_ends_before_all_bytes_came_is_to_be_repeated_and_its_round_still_waits_for_it(opened, sent):
    payload = contribution()
    with opened.unchanged():
        found = refusal(lambda: opened.a.push_messages(messages(opened.a.header(payload), *payload.chunks[:sent])))
    assert (found.status, found.code) == (STATUS.UNAVAILABLE, "TORN_UPLOAD")
    assert "push again" in found.words
    assert opened.shard.ledger.rejected == {}
    assert opened.shard.metric("refused_calls_total", code="TORN_UPLOAD") == 1
    assert opened.push(opened.a).outcome == ACCEPTED


def test_a_push_that_falls_silent_is_cut_off(serve, clock):
    opened = OpenRound(serve(settings_with(lease={"lease_s": 0.2, "heartbeat_s": 0.05}), clock))  # the clock stands
    payload = contribution()
    for sent in (messages(opened.a.header(payload), payload.chunks[0]), []):
        with opened.unchanged():
            found = refusal(lambda sent=sent: opened.a.push_messages(sent, hold=True))
        assert (found.status, found.code) == (STATUS.UNAVAILABLE, "TORN_UPLOAD")
        assert "push again" in found.words


def test_a_message_above_the_limit_is_refused_with_the_limit_named(opened):
    too_long = bytes(rpc.MAX_MESSAGE_BYTES + 1)

    async def push() -> Any:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(opened.shard.address, options=options) as channel:
            method = channel.stream_unary("/diloco.v1.ParameterServer/Push")
            call = method(metadata=opened.a.metadata())
            await call.write(too_long)
            return await call

    with opened.unchanged():
        found = refusal(lambda: opened.shard.loop.run(push()))
    assert found.status == STATUS.RESOURCE_EXHAUSTED
    assert str(rpc.MAX_MESSAGE_BYTES) in found.words


def test_a_shard_that_ends_waits_for_the_contributions_that_it_asked_for(opened):
    opened.push(opened.a)
    ending = opened.shard.loop.begin(opened.shard.server.host.drain(DEADLINE_S))
    until(lambda: opened.shard.loop.look(lambda: opened.shard.core.draining), "the drain")
    assert not ending.done()

    assert opened.push(opened.b).outcome == ACCEPTED

    ending.result(DEADLINE_S)
    assert opened.shard.version() == 1
    assert not opened.shard.loop.look(lambda: opened.shard.core.open_rounds)


def test_a_shard_that_ends_does_not_wait_for_learners_that_say_nothing(opened):
    opened.push(opened.a)

    opened.shard.loop.run(opened.shard.server.host.drain(0.05))

    assert opened.shard.version() == 0
    assert opened.shard.loop.look(lambda: opened.shard.core.open_rounds) == 1
