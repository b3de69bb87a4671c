"""What tools make of what other processes say: bounds for everything, and nothing that a terminal would obey."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from test_handshake_contract import served

from diloco_deploy import health
from diloco_deploy.cluster.asking import IN_PLAINTEXT, NoAnswer, ask
from diloco_deploy.cluster.reading import BODY_BYTES_MAX, Unreadable, get, read_json, read_status
from statuses import fetch_status

ESCAPES = "\x1b[2J\x1b]0;pwned\x07\r\n\x9b31m\u202eevil"
HEAD = b"HTTP/1.1 200 OK\r\n"
SHARD = {
    "role": "shard", "name": "shard-0", "run": "local", "index": 0, "count": 1, "ready": True, "tokens_merged": 3,
    "learners": [{"id": "cat", "state": "alive", "loss": 1.5, "missed": {"ABSENT": 1}, "away": [], "left_out": False}],
    "fragments": [{"id": 0, "version": 7}], "rejected": {"BAD_PAYLOAD": 2}, "data_dir": None, "of a newer release": [1],
}  # fmt: skip


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that answers each connection so; yields its address."""

    def talk(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            answer(connection)

    with served(socket.create_server(("127.0.0.1", 0)), talk) as address:
        yield address


def drips(prefix: bytes, drop: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.sendall(prefix)
        for _ in range(200):
            time.sleep(0.02)
            connection.sendall(drop)

    return answer


def says(data: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(data)


@pytest.mark.parametrize(
    "answer", [drips(HEAD + b"\r\n", b" "), drips(HEAD, b"a"), drips(b"", b"H"), drips(HEAD, b"A: b\r\n")]
)
def test_an_answer_that_drips_ends_in_time(answer: Callable[[socket.socket], None]) -> None:
    began = time.monotonic()
    with serving(answer) as address:
        with pytest.raises(TimeoutError):
            get(address, "/status", 0.3)
        with pytest.raises(NoAnswer, match="no answer in time"):
            ask(IN_PLAINTEXT, address, 0, 0, 0.3)
    assert time.monotonic() - began < 3.0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (HEAD + b"Content-Length: 1073741824\r\n\r\n", "1073741824 bytes"),
        (HEAD + b"Content-Length: -1\r\n\r\n", "-1 bytes"),
        (HEAD + b"A: " + b"b" * 70_000, "a head of more"),
        (b"\x00\xff\r\n\r\n", "not speak HTTP"),
        (b"", "not speak HTTP"),
        (HEAD + b"A: b\r\n" * 2000 + b"\r\n", "not speak HTTP"),
    ],
)
def test_what_is_no_answer_of_ours_is_not_taken(data: bytes, why: str) -> None:
    with serving(says(data)) as address, pytest.raises(Unreadable, match=why):
        get(address, "/status", 5.0)


def test_of_a_body_without_an_end_no_more_is_read_than_may_come() -> None:
    with serving(lambda c: c.sendall(HEAD + b"\r\n" + b" " * (BODY_BYTES_MAX + 65536))) as address:
        assert len(get(address, "/status", 20.0)[1]) == BODY_BYTES_MAX


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[" * 200_000, "lists and objects"),
        (b'{"a":' * 5000, "not valid JSON"),
        (body({"a": [[[[[[[[[1]]]]]]]]]}), "deep"),
        (b'{"a": ' + b"9" * 400 + b"}", "400 digits"),
        (b'{"a": 99999999999999999999}', "20 digits"),
        (b'{"a": 1e999}', "1e999 is not a number"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b"[1]", "not an object"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_json_has_bounds(data: bytes, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read_json(data)


def test_texts_come_out_printable_keys_too() -> None:
    found = read_json(body({ESCAPES: [ESCAPES, {"a": ESCAPES}]}))
    assert str(found).isprintable()
    assert "evil" in str(found)


def test_a_status_is_taken_with_what_a_newer_release_says() -> None:
    assert read_status(body(SHARD)) == SHARD


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"role": "king"}, "neither a shard nor a worker"),
        ({"rounds": "7"}, 'rounds is "7", and no count'),
        ({"rounds": -1}, "rounds is -1"),
        ({"rounds": True}, "rounds is true"),
        ({"ready": 1}, "ready is 1, and no flag"),
        ({"uptime_s": 1e300}, "uptime_s is 1e"),
        ({"fragments": {}}, "fragments is not a list"),
        ({"fragments": [[]]}, "fragments. is not an object"),
        ({"fragments": [{"id": 1}]}, "fragments.version is missing"),
        ({"learners": [{"id": "a", "state": "alive", "left_out": 7}]}, "left_out is 7"),
        ({"learners": [{"id": "a", "state": "alive", "missed": {"ABSENT": "x"}}]}, "missed is .*no counts"),
        ({"learners": [{"id": "a", "state": "alive", "away": [{"for_s": "long"}]}]}, "away.for_s is"),
    ],
)
def test_a_status_is_what_it_ought_to_be(change: dict[str, Any], why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read_status(body(SHARD | change))


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"[" * 200_000, id="deep"), body({"role": "shard", "rounds": "x"}), b"", b"not json", b"[]",
        body({"role": "something else"}), b"\xff",
    ],
)  # fmt: skip
def test_tools_take_it_for_no_answer(said: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(says(HEAD + b"\r\n" + said)) as address:
        assert fetch_status(address, 5.0) is None
        with pytest.raises(NoAnswer):
            ask(IN_PLAINTEXT, address, 0, 0, 5.0)
        assert health.check(None, address, None) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (HEAD + b"\r\n" + body({"ready": False, "reason": ESCAPES}), "evil"),
        (b'HTTP/1.1 404 Not Found\r\n\r\n{"error": "no"}', "answers 404"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "does not answer"),
    ],
)
def test_health_says_what_came_on_one_printable_line(data, words, capsys) -> None:
    with serving(says(data)) as address:
        health.check(None, address, None)
    said = capsys.readouterr().out
    assert words in said
    assert said.rstrip("\n").isprintable()
