"""The knowledge and plans of a hostile learner, and the transport that it needs. `hostile.py` carries them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from diloco_common.codec import Chunk, Payload
from diloco_common.ports import Transport
from diloco_common.trust.identity import Identity
from diloco_common.wire.manifest import Fragment, Manifest
from diloco_common.wire.messages import Collect, PullRequest, PushHeader

PUSHES = ("contribute", "contribute", "claim", "claim", "lie", "lie", "other bytes", "not finite")
AS_OTHERS = "contribute as others"
"""How a hostile learner answers rounds, if it has no other way."""
TACTICS = (
    *PUSHES, "replay", "seed", "join", "come and go", "hold pushes", "hold pulls", "hold streams", "pull",
    "extreme lease",
)  # fmt: skip
"""Used under its own id. Some are listed twice, to be tried more often."""
FOREIGN = ("join as another", "leave as another", "push as another", "attend as another", "ghosts")
"""Used under the ids of others."""
MANNERS = ("honest", "fast", "slow", "liar", "still", "silent")
"""How it reports: honestly; 1000 steps at a time; endless steps; anything; never a step; not at all."""


class OpenCall(Protocol):
    async def receive(self) -> Any:
        """Wait for the shard's first message. Raises a Refusal or Unavailable."""

    def cancel(self) -> None: ...


class HostileTransport(Transport, Protocol):
    """A transport to one shard on which calls can be started and left open."""

    def hold_push(self, caller: Identity, *parts: PushHeader | Chunk) -> OpenCall:
        """A push that never ends."""

    def hold_pull(self, caller: Identity, request: PullRequest) -> OpenCall:
        """A pull that nobody reads."""

    def hold_stream(self, caller: Identity) -> OpenCall:
        """A control stream that nobody reads, and without reports."""


@dataclass(frozen=True, slots=True)
class Sniffed:
    """A push as an eavesdropper sees it."""

    shard: int
    caller: Identity
    header: PushHeader
    payload: Payload


@dataclass(frozen=True)
class Plot:
    """What a hostile learner knows of the run, and its plans."""

    run_id: str
    manifest: Manifest
    push_encoding: str
    pull_encoding: str
    honest: Callable[[Fragment, int], Tensor]
    """Fragment and tokens -> what an honest learner might contribute: float32 [num_elements]."""
    sniffed: Callable[[], Sequence[Sniffed]]
    """Recent pushes of others."""
    tactics: tuple[str, ...]
    manners: tuple[str, ...]
    """Ways to report; it usually sticks to one of them."""
    answers: float
    """Probability of contributing to a round that opens."""
    step_s: float
    call_s: float


@dataclass
class Session:
    shard: int
    transport: HostileTransport
    caller: Identity
    process_id: str
    base: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Fragment -> epoch and number of the latest version it has heard of."""
    asked: dict[int, Collect] = field(default_factory=dict)
    stream: Any = None
