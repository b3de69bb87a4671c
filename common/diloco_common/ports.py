"""The ports of a shell: time, randomness, threads, history and transport, passed in from outside.

There are two worlds. In production the ports are the wall clock, the system's randomness, real threads, files and gRPC.
Each process builds its world in one file (`diloco_server/shell/server.py`, `diloco_worker/joining.py`). In the
simulator they are virtual time, a seeded generator, memory and faults. Shells are the same in both, and wait only with
asyncio: the event loop belongs to the world too, and a virtual loop sleeps without taking time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeAlias, TypeVar

from diloco_common.codec import Chunk, Payload
from diloco_common.errors import Unavailable as Unavailable
from diloco_common.trust.identity import Identity
from diloco_common.wire.messages import (
    Directive,
    FollowRequest,
    JoinAnswer,
    JoinRequest,
    Progress,
    PullHeader,
    PullRequest,
    PushAnswer,
    PushHeader,
)

T = TypeVar("T")
Clock: TypeAlias = Callable[[], float]
"""Seconds since an arbitrary start. Monotonic, and comparable only inside one process."""


@dataclass(frozen=True)
class World:
    """The surroundings of one process."""

    clock: Clock
    """Time for leases, waits and reports."""
    cpu_clock: Clock
    random: Random
    """For the jitter of waits, and for process ids."""
    threads: Callable[[int, str], Executor]
    """Makes an executor from a number of threads and a name. Shells use it through the event loop's `run_in_executor`
    or through `submit`, and end it with `shutdown(wait=False, cancel_futures=True)`."""
    give_back: Callable[[], None] = lambda: None
    """Returns free memory to the system if nothing will use it soon. Takes milliseconds."""


class History(Protocol):
    """A process's record of events, with which the simulator's judge checks promises."""

    def write(self, what: str, **facts: Any) -> None:
        """Append one line. Safe from any thread."""


class Heard(Protocol):
    """A reader's end of a Follow call."""

    async def hear(self) -> Directive | None:
        """The next directive of a known kind; None: the shard ended the stream. Raises a Refusal or Unavailable.

        There is no deadline.
        """

    def cancel(self) -> None:
        """Give up the stream. May be repeated."""


class ControlStream(Heard, Protocol):
    """A learner's end of an Attend call."""

    async def report(self, progress: Progress) -> None:
        """Send progress. Raises Unavailable."""


class Transport(Protocol):
    """The calls of diloco.v1 from one learner or reader to one shard, as plain values.

    Every call raises the shard's Refusal, or Unavailable. `timeout_s` limits the whole call.
    """

    async def join(self, caller: Identity, request: JoinRequest, timeout_s: float) -> JoinAnswer: ...

    def attend(self, caller: Identity) -> ControlStream: ...

    def follow(self, caller: Identity, request: FollowRequest) -> Heard: ...

    async def push(self, caller: Identity, header: PushHeader, payload: Payload, timeout_s: float) -> PushAnswer: ...

    def pull(
        self, caller: Identity, request: PullRequest, timeout_s: float
    ) -> AsyncGenerator[PullHeader | Chunk, None]:
        """The header, then the chunks of its payload, if any. Close it early with `aclose`."""

    async def leave(self, caller: Identity, timeout_s: float) -> None: ...

    async def close(self, grace_s: float) -> None:
        """End all connections. May be repeated."""


class ShardService(Protocol):
    """The shard's end of the calls, for any transport. Every call may raise a Refusal.

    The transport has already checked the run and the caller's identity.
    """

    async def read(self, caller: Identity, message: Callable[[], Awaitable[T]]) -> T:
        """Read the only message of a call, if the transport can leave it unread until then.

        Only a few are read at once. `message` also parses it; a large message then takes several times its size in RAM.
        """

    async def join(self, caller: Identity, request: JoinRequest) -> JoinAnswer: ...

    def attend(self, caller: Identity, reports: AsyncIterator[Progress]) -> AsyncGenerator[Directive, None]:
        """Yields directives until the lease or the learner's side ends. Close it with `aclose`."""

    def follow(self, caller: Identity, request: FollowRequest) -> AsyncGenerator[Directive, None]:
        """Yields directives until the shard or the reader's side ends. Close it with `aclose`."""

    async def push(self, caller: Identity, parts: AsyncIterator[PushHeader | Chunk]) -> PushAnswer:
        """`parts`: the header, then the chunks. The lease is checked before the first part is read."""

    def pull(
        self, caller: Identity, request: PullRequest, ends_in_s: float = 0.0
    ) -> AsyncGenerator[PullHeader | Chunk, None]:
        """The header, then the chunks of its payload, if any. Close it early with `aclose`.

        `ends_in_s`: the time after which the transport ends the call of a caller that does not read; infinity: never.
        """

    async def leave(self, caller: Identity) -> None:
        """End the lease, if there is one. May be repeated."""
