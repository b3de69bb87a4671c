"""The servicer asks who calls before it looks at anything that was sent."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
import pytest

from diloco_common.errors import WrongRun
from diloco_common.ports import ShardService
from diloco_server.servicer import ParameterServer

CALLS = ("Join", "Attend", "Push", "Pull", "Leave")


class Aborted(Exception):
    """What ends a call, as in gRPC."""


class StrangersCall:
    """A call from another run."""

    status: grpc.StatusCode | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("diloco-run", "another"),)

    async def abort(self, status: grpc.StatusCode, _words: str, _metadata: object) -> NoReturn:
        self.status = status
        raise Aborted


class Unread:
    """A message or a stream that must not be looked at."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was read before the caller was known")


@pytest.mark.parametrize("method", CALLS)
def test_a_stranger_is_refused_before_the_message_is_read(method: str) -> None:
    refused: list[tuple[str, str]] = []
    service: Any = ShardService  # has the methods; none is called
    servicer = ParameterServer(service, "run", None, lambda learner_id, code, _: refused.append((learner_id, code)))

    async def call() -> None:
        answer = getattr(servicer, method)(Unread(), StrangersCall())
        if method in ("Attend", "Pull"):
            async for _ in answer:
                raise AssertionError("a stranger was answered")
        else:
            await answer

    with pytest.raises(Aborted):
        asyncio.run(call())
    assert refused == [("", WrongRun.code)]
