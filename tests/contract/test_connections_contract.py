"""What arrives at a port, proper or not, and where learners find it: raw sockets, bursts, streams (Fault 23)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import Counter
from pathlib import Path

import grpc
import pytest
from in_process import TENSORS, InProcessShard, settings_with

from diloco_common.wire import protobuf, rpc
from diloco_common.wire.addresses import write_address
from diloco_common.wire.messages import PROTOCOL, Committed, Pulse
from diloco_protos import parameter_server_pb2 as pb
from http2 import CALL, DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, call_headers, frame
from waiting import until


def connect(shard: InProcessShard) -> socket.socket:
    host, _, port = shard.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=120)


def join_by_hand(learner_id: bytes) -> bytes:
    """The bytes of one Join call."""
    request = pb.JoinRequest(
        protocol=PROTOCOL, process_id="x", tensors=protobuf.tensors_to_pb(TENSORS), decodes=rpc.DECODES
    ).SerializeToString()
    headers = call_headers(f"{CALL}Join", ("diloco-run", "local"), ("diloco-learner", learner_id))
    message = b"\0" + struct.pack(">I", len(request)) + request
    return PREFACE + frame(SETTINGS, 0, 0) + headers + frame(DATA, END_STREAM, 1, message)


def answer_to(shard: InProcessShard, sent: bytes) -> bytes:
    """All that the shard sends back until it ends the stream or the connection."""
    received = b""
    with connect(shard) as connection, contextlib.suppress(ConnectionError, TimeoutError):
        connection.sendall(sent)
        connection.settimeout(5)
        while part := connection.recv(65536):
            received += part
            if _ends_stream(received):
                break
    return received


def _ends_stream(received: bytes) -> bool:
    """Whether a frame of stream 1 is its last: end of stream, or a reset."""
    at = 0
    while at + 9 <= len(received):
        length = int.from_bytes(received[at : at + 3], "big")
        kind, flags = received[at + 3], received[at + 4]
        stream = int.from_bytes(received[at + 5 : at + 9], "big")
        if stream == 1 and (kind == 3 or (kind == HEADERS and flags & END_STREAM)):
            return True
        at += 9 + length
    return False


def test_a_join_written_by_hand_is_understood(serve):
    """Else the cases below would prove nothing."""
    shard = serve()
    answer_to(shard, join_by_hand(b"by-hand"))
    assert shard.member_state("by-hand") == "alive"


def test_connections_that_say_nothing_do_not_stay(serve):
    """Each takes a place: with 10 s for a handshake, few hosts kept everybody out."""
    with connect(serve()) as connection:
        connection.settimeout(8)
        while connection.recv(65536):
            pass


@pytest.mark.parametrize(
    "learner_id",
    [b"a\0b", b"a\nb", b"a\r\nb", b"\x1b[31mred\x1b[0m", b"../../x", b"\xff\xfe", b"\x7f", b""],
    ids=["NUL", "newline", "CR LF", "ANSI escape", "path", "no UTF-8", "DEL", "empty"],
)
def test_a_raw_learner_id_is_refused_and_never_written_raw(serve, written, learner_id):
    shard = serve()

    answer = answer_to(shard, join_by_hand(learner_id))

    assert answer
    assert shard.core.membership.all() == []
    assert all(line.isprintable() for line in written.getvalue().split("\n"))
    labels = {v for f in shard.server.host.metrics.registry.collect() for s in f.samples for v in s.labels.values()}
    assert all(label.isprintable() for label in labels)
    answer_to(shard, join_by_hand(b"by-hand"))
    assert shard.member_state("by-hand") == "alive"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="HTTP/1.1"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(64), id="TLS"),
        pytest.param(os.urandom(4096), id="noise"),
        pytest.param(PREFACE + os.urandom(4096), id="noise after the preface"),
        pytest.param(PREFACE + frame(DATA, 0, 9, b"x" * 100), id="data of no stream"),
        pytest.param(PREFACE + frame(HEADERS, END_HEADERS, 1, b"\xff" * 500), id="headers that are none"),
        pytest.param(join_by_hand(b"half")[:-200], id="half a call"),
    ],
)
def test_garbage_on_the_port_changes_nothing(serve, clock, sent):
    shard = serve(settings_with(), clock)
    a = shard.caller("a")
    a.join()
    a.seed()
    stream = a.attend()
    stream.hear(Pulse)
    before = shard.state()

    with connect(shard) as connection:
        connection.sendall(sent)
        stream.say(1)
        until(lambda: shard.core.membership.get("a").progress.inner_step == 1, "a is heard meanwhile")

    assert shard.state() == before
    assert [m.learner_id for m in shard.core.membership.all()] == ["a"]


def test_idle_connections_do_not_keep_a_learner_from_attending(serve, clock):
    shard = serve(settings_with(lease={"lease_s": 1.0, "heartbeat_s": 0.1}), clock)
    a = shard.caller("a")
    a.join()
    a.seed()
    stream = a.attend()

    with contextlib.ExitStack() as idle:
        for _ in range(200):
            idle.enter_context(connect(shard))
        late = shard.caller("late")  # dials while the others are there
        late.join()
        heard = [late.attend().hear(Committed)]
        for step in range(1, 13):  # for longer than a lease
            clock.now += 0.11
            stream.say(step)
            heard.append(stream.hear(Pulse))
        assert shard.member_state("a") == "alive"

    assert len(heard) > 3
    assert shard.ledger.evictions["LEASE_EXPIRED"] <= 1  # late, which reports nothing


def test_a_learner_that_reads_slowly_hears_the_newest(serve, clock):
    shard = serve(settings_with(), clock)
    a = shard.caller("a")
    a.join()
    stream = a.attend()
    stream.hear(Pulse)

    def flood() -> int:
        for _ in range(500):
            shard.core.send_pulses()
        shard.server.host.advance()
        return len(shard.server.host.streams)

    assert shard.loop.look(flood) == 1

    stream.hear(Pulse)
    assert len(stream.heard) < 100


CONNECTIONS = 16
CALLS = 120
"""On each connection: together more than gRPC's own limit, where it begins to cancel calls by chance."""


async def _burst() -> Counter[grpc.StatusCode]:
    async def answer(request: bytes, context: object) -> bytes:
        return b""

    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    methods = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("burst", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", rpc.BULK_CHANNEL_OPTIONS) for _ in range(CONNECTIONS)]
    try:
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        calls = [channel.unary_unary("/burst/Call")(b"", timeout=60.0) for channel in channels for _ in range(CALLS)]
        return Counter(await asyncio.gather(*(call.code() for call in calls)))
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
        await server.stop(0)


def test_no_call_of_a_burst_is_cancelled() -> None:
    assert asyncio.run(_burst()) == {grpc.StatusCode.OK: CONNECTIONS * CALLS}


def tell(file: Path, shard: InProcessShard) -> None:
    write_address(file, "shard", "shard-0", grpc=shard.address, http="127.0.0.1:1")


def test_a_learner_follows_a_shard_that_moves(serve, train, tmp_path):
    settings = settings_with(shard={"data_dir": tmp_path / "data"})
    file = tmp_path / "shard-0.json"
    old = serve(settings)
    tell(file, old)
    a = train(f"@{file}")
    a.until(lambda: old.version() > 0, "a version")

    old.stop()
    new = serve(settings)
    assert new.address != old.address
    tell(file, new)
    came_back_with = new.version()

    a.until(lambda: new.version() > came_back_with, "a contributes where the shard is now")
