"""One shard without threads, disk or network: everything that its core asks for is done at once, in order.

The lab and the numerics tests drive it, and pass in the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from diloco_common.codec import Payload
from diloco_common.errors import Refusal
from diloco_common.observe.metrics.shard import ComputePhase
from diloco_common.ports import Clock
from diloco_common.settings import Settings
from diloco_common.wire.messages import PushAnswer, PushHeader
from diloco_server.core.effects import MergeRound, Tell
from diloco_server.core.fragment import FragmentState
from diloco_server.core.ledger import Fact
from diloco_server.core.membership import Member
from diloco_server.core.merge import piece_norms
from diloco_server.core.shard import Shard
from diloco_server.shell.driver import EffectDriver, Job
from diloco_server.storage.version_file import StoredVersion

T = TypeVar("T")


class LockstepShard:
    """A core and its effects. Messages and events are dropped, unless a subclass handles them."""

    def __init__(self, settings: Settings, epoch: int, clock: Clock) -> None:
        self.settings = settings
        self.shard = Shard(settings, epoch)
        self.clock = self.stopwatch = clock
        self.driver = EffectDriver(self.shard, self, self)

    def advance(self) -> None:
        """Let the core decide, and carry out its decisions."""
        self.shard.tick(self.clock())
        self.driver.carry_out_all()

    def push(self, member: Member, header: PushHeader, payload: Payload) -> PushAnswer:
        """Check the header, then the bytes, then accept the contribution."""
        answer = self.shard.taking.admit(member, header, self.clock())
        if answer is None:
            try:
                norms = piece_norms(payload, self.shard.versions.owned(header.fragment_id).fragment.pieces)
            except Refusal as refusal:
                answer = self.shard.taking.reject(member, header, refusal)
            else:
                answer = self.shard.taking.contribute(member, header, payload, norms, self.clock())
        self.advance()
        return answer

    # ------------------------------------------------------------ the shell of its effects

    def tell(self, tell: Tell) -> None: ...

    def start(self, job: Job, name: str) -> None:
        run_to_end(job)

    async def compute(self, phase: ComputePhase, work: Callable[[], T]) -> T:
        return work()

    def failed(self, merge: MergeRound, error: Exception) -> None:
        """Nothing to do: the error ends the run."""

    async def keep(self, version: StoredVersion) -> None:
        """Keep nothing: no version outlives this process."""

    # ------------------------------------------------------------ the witness of its effects

    def note(self, event: Fact) -> None: ...

    def merging(self, merge: MergeRound) -> None: ...

    def merged(self, seconds: float) -> None: ...

    def announcing(self, state: FragmentState) -> None: ...


def run_to_end(job: Job) -> None:
    """Run a job that never waits."""
    try:
        job().send(None)
    except StopIteration:
        return
    raise AssertionError(f"{job} waits for something")
