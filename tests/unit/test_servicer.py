"""The servicer asks who calls before it looks at anything that was sent."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest

from diloco_common.errors import WrongRun
from diloco_common.ports import ShardService
from diloco_common.wire import rpc
from diloco_server.shell.access import Callers
from diloco_server.shell.servicer import ParameterServer

CALLS = ("Join", "Attend", "Push", "Pull", "Leave")


class Aborted(Exception):
    """What ends a call, as in gRPC."""


class StrangersCall:
    """A call from another run."""

    status: grpc.StatusCode | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("diloco-run", "another"),)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:40000"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def abort(self, status: grpc.StatusCode, _words: str, _metadata: object) -> NoReturn:
        self.status = status
        raise Aborted


class Unread:
    """A message or a stream that must not be looked at."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was read before the caller was known")


def handler_of(servicer: ParameterServer, method: str) -> Any:
    """What gRPC calls."""
    details = SimpleNamespace(method=f"/{rpc.SERVICE}/{method}", invocation_metadata=())
    found: Any = servicer.handler().service(details)
    return found.stream_stream if method in ("Attend", "Pull") else found.stream_unary


@pytest.mark.parametrize("method", CALLS)
def test_a_stranger_is_refused_before_the_message_is_read(method: str) -> None:
    refused: list[tuple[str, str]] = []
    service: Any = ShardService  # has the methods; none is called
    servicer = ParameterServer(
        service, "run", Callers(lambda: 0.0), lambda learner_id, code, _: refused.append((learner_id, code))
    )

    async def call() -> None:
        await handler_of(servicer, method)(Unread(), StrangersCall())

    with pytest.raises(Aborted):
        asyncio.run(call())
    assert refused == [("", WrongRun.code)]
