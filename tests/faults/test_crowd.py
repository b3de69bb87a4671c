"""A crowd at the port of a shard: a thousand connections, garbage, idle streams, and callers that read nothing."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import loudly
import psutil
import pytest
from steady import PATIENT, SteadyCluster

from processes import until

CONNECTIONS = 1000
RSS_MORE = 64 * 2**20
"""Bytes that the crowd may cost at most."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS_FRAME = b"\0\0\0\4\0\0\0\0\0"
WINDOW_OF_NOTHING = b"\0\0\6\4\0\0\0\0\0" + b"\0\4" + b"\0\0\0\0"
"""SETTINGS_INITIAL_WINDOW_SIZE = 0: this caller takes no byte of any answer."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SteadyCluster]:
    soft, _ = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)
    if soft < 2 * CONNECTIONS:
        loudly.skip("a thousand connections", f"only {soft} files may be open (ulimit -n)")
    with SteadyCluster(tmp_path, PATIENT) as made:
        made.add("ann", "ben")
        yield made


def headers(path: bytes) -> bytes:
    """A HEADERS frame that opens stream 1, with literal fields."""
    pairs = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"), (b"te", b"trailers"),
        (b"content-type", b"application/grpc"), (b"diloco-run", b"local"), (b"diloco-learner", b"crowd"),
    ]  # fmt: skip
    block = b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in pairs)
    return len(block).to_bytes(3, "big") + b"\1\4\0\0\0\1" + block


def greetings(chance: random.Random) -> list[bytes]:
    call = b"/diloco.v1.ParameterServer/"
    return [
        b"",
        chance.randbytes(2000),
        PREFACE + chance.randbytes(2000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        PREFACE + SETTINGS_FRAME,
        PREFACE + SETTINGS_FRAME + headers(call + b"Attend"),
        PREFACE + SETTINGS_FRAME + headers(call + b"Push"),
        PREFACE + WINDOW_OF_NOTHING + headers(call + b"Pull"),
        PREFACE + SETTINGS_FRAME + headers(call + b"Join") + b"\0\0\5\0\0\0\0\0\1" + b"\0\xff\xff\xff\xff",
    ]


@pytest.mark.gate
def test_a_crowd_costs_little_and_disturbs_nobody(cluster: SteadyCluster) -> None:
    """Fault 23: 1000 connects, idle streams, garbage bytes, slow readers: RSS + <= 64 MiB, real learners unaffected."""
    (shard,) = cluster.shards
    process = psutil.Process(shard.pid)
    host, _, port = shard.endpoints.grpc.rpartition(":")
    said = greetings(random.Random(23))
    before, most = process.memory_info().rss, 0
    evictions, reconnects = shard.status()["evictions"], sum(h.reconnects for h in cluster.ask())
    with ExitStack() as crowd:
        for index in range(CONNECTIONS):
            connection = crowd.enter_context(socket.create_connection((host, int(port)), timeout=30))
            try:
                connection.sendall(said[index % len(said)])
            except ConnectionError:  # it was thrown out already
                continue
        for name in cluster.learners:
            cluster.await_merged(name)
            most = max(most, process.memory_info().rss)
        rounds = shard.status()["rounds"]
        until(lambda: shard.status()["rounds"] > rounds + 10, "rounds in the crowd")
        most = max(most, process.memory_info().rss)
        descriptors = process.num_fds()
        cluster.add("late")  # there is still a place for who comes now
        connected = sum(c.status == psutil.CONN_ESTABLISHED for c in process.net_connections("tcp"))
    print(f"{connected} connections, {descriptors} descriptors, RSS + {(most - before) / 2**20:.1f} MiB")
    assert connected > CONNECTIONS / 3, "most of the crowd was let in"
    assert most - before <= RSS_MORE
    assert shard.status()["evictions"] == evictions
    assert sum(h.reconnects for h in cluster.ask()) == reconnects
    assert {learner["id"] for learner in shard.status()["learners"]} == set(cluster.learners)
    assert cluster.disagreements() == []
    assert "Traceback" not in cluster.said()
    until(lambda: process.num_fds() < descriptors - CONNECTIONS / 3, "the crowd to be forgotten")
