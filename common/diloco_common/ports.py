"""What a shell is given from outside: time, chance, threads, a history, and a way to the shards.

There are two worlds. In production these are the wall clock, the system's randomness, real threads, files and gRPC;
each process builds its world in one file (`diloco_server/server.py`, `diloco_worker/joining.py`). In the simulator they
are virtual time, a seeded generator, memory and faults. The shells are the same in both. They wait with asyncio alone:
the event loop is part of the world too, and a virtual one sleeps in no time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeAlias

from diloco_common.codec import Payload
from diloco_common.errors import DilocoError
from diloco_common.identity import Identity
from diloco_common.messages import (
    Directive,
    JoinAnswer,
    JoinRequest,
    Progress,
    PullHeader,
    PullRequest,
    PushAnswer,
    PushHeader,
)

Clock: TypeAlias = Callable[[], float]
"""Seconds from any beginning. Monotonic, and comparable inside one process only."""


@dataclass(frozen=True)
class World:
    """What one process runs in."""

    clock: Clock
    """The time of leases, waits and reports."""
    cpu_clock: Clock
    """CPU seconds of the calling thread."""
    random: Random
    """Jitter of waits, and ids of processes."""
    threads: Callable[[int, str], Executor]
    """Makes an executor of so many threads, named so. It is used through the event loop's `run_in_executor`, or by
    `submit`; `shutdown(wait=False, cancel_futures=True)` ends it."""


class History(Protocol):
    """Where a process writes down what happens to it, so that promises can be checked (`diloco_common/judge.py`)."""

    def write(self, what: str, **facts: Any) -> None:
        """Append one line. In any thread."""


class Unavailable(DilocoError):
    """A call or a stream broke, or took too long: nobody knows what became of it."""

    code = "UNAVAILABLE"


class ControlStream(Protocol):
    """One Attend, at the learner's end."""

    async def report(self, progress: Progress) -> None:
        """Send progress. Raises Unavailable."""

    async def hear(self) -> Directive | None:
        """The next directive that this build knows; None: the shard ended the stream. Raises a Refusal or Unavailable.

        Has no deadline of its own.
        """

    def cancel(self) -> None:
        """Give the stream up. Repeating it is fine."""


class Transport(Protocol):
    """The way from one learner to one shard: the five calls of diloco.v1 as plain values.

    Every call raises the Refusal that the shard answered, or Unavailable. `timeout_s` is for the whole call.
    """

    async def join(self, caller: Identity, request: JoinRequest, timeout_s: float) -> JoinAnswer: ...

    def attend(self, caller: Identity) -> ControlStream: ...

    async def push(self, caller: Identity, header: PushHeader, payload: Payload, timeout_s: float) -> PushAnswer: ...

    def pull(
        self, caller: Identity, request: PullRequest, timeout_s: float
    ) -> AsyncGenerator[PullHeader | bytes, None]:
        """The header, then the chunks of its payload, if it has one. Close it early with `aclose`."""

    async def leave(self, caller: Identity, timeout_s: float) -> None: ...

    async def close(self, grace_s: float) -> None:
        """End all connections. Repeating it is fine."""


class ShardService(Protocol):
    """The other end: what a shard answers, whichever transport brings the call. Every call raises a Refusal.

    The transport has checked the run and the caller's right to be who it says it is.
    """

    async def join(self, caller: Identity, request: JoinRequest) -> JoinAnswer: ...

    def attend(self, caller: Identity, reports: AsyncIterator[Progress]) -> AsyncGenerator[Directive, None]:
        """Directives until the lease, or the learner's side, ends. Close it with `aclose`."""

    async def push(self, caller: Identity, parts: AsyncIterator[PushHeader | bytes]) -> PushAnswer:
        """`parts`: the header, then the chunks. The lease is checked before any of them is read."""

    def pull(self, caller: Identity, request: PullRequest) -> AsyncGenerator[PullHeader | bytes, None]:
        """The header, then the chunks of its payload, if it has one. Close it early with `aclose`."""

    async def leave(self, caller: Identity) -> None: ...
