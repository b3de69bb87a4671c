"""Keeps a unit test in its own process and off the network. What needs either belongs to tests/contract or
tests/artifacts."""

from __future__ import annotations

import multiprocessing.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import grpc

FORBIDDEN = {
    "subprocess.Popen": "starts a process",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.system": "starts a process",
    "socket.bind": "takes a port",
}
"""Audit events of Python. gRPC takes ports and multiprocessing spawns without them: `alone` stands in the way there."""

_found: list[str] | None = None  # None: anything goes


def _forbid(event: str, _: Any = None) -> None:
    if _found is not None and event in FORBIDDEN:
        _found.append(f"a unit test {FORBIDDEN[event]} ({event}): move it to tests/contract or tests/artifacts")
        raise AssertionError(_found[-1])


sys.addaudithook(_forbid)  # Python has no way to take it away again


@contextmanager
def alone() -> Iterator[list[str]]:
    """Whatever starts a process or takes a port in here fails. Gives what was tried, as the error may be swallowed."""
    global _found
    before, _found = _found, []

    def serve(*_: Any, **__: Any) -> None:
        _forbid("socket.bind")

    def spawn(*_: Any, **__: Any) -> None:
        _forbid("subprocess.Popen")

    with (
        mock.patch.object(grpc, "server", serve),
        mock.patch.object(grpc.aio, "server", serve),
        mock.patch.object(multiprocessing.util, "spawnv_passfds", spawn),
    ):
        try:
            yield _found
        finally:
            _found = before
