"""Unit tests cannot start a process or take a port, even where the error is swallowed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
from collections.abc import Callable

import grpc
import pytest

from alone import alone


def bind() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: subprocess.run(["true"], check=True), "starts a process"),
        (lambda: multiprocessing.get_context("spawn").Process(target=print).start(), "starts a process"),
        (lambda: os.system("true"), "starts a process"),
        (bind, "takes a port"),
        (lambda: grpc.aio.server(), "takes a port"),
    ],
    ids=["subprocess", "spawn", "system", "bind", "grpc"],
)
def test_an_attempt_fails_and_is_remembered(attempt: Callable[[], object], words: str) -> None:
    with alone() as tried:
        with pytest.raises(AssertionError, match=words):
            attempt()
        with contextlib.suppress(AssertionError):
            attempt()
    assert [words in each and "tests/contract" in each for each in tried] == [True, True]


def test_what_a_test_may_do_passes() -> None:
    with alone() as tried:
        for sock in socket.socketpair():
            sock.close()
    assert tried == []
