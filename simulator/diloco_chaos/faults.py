"""The faults of a run: their plan, a pure function of the seed and the size of the cluster, and the cluster they hit.

`ChaosCluster` runs on the main thread. This thread gets the signals, and child processes end when it ends.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from diloco_common.errors import DilocoError
from diloco_common.settings import Settings
from diloco_common.settings_loader import save
from diloco_common.wire.addresses import write_json
from diloco_common.wire.calls import END_S, LONG_S
from diloco_deploy import LOOK_S
from diloco_deploy.run.folder import ClusterFolder
from diloco_deploy.run.members import Children, Programs
from diloco_deploy.run.supervisor import Interrupts, Supervisor

START_S = 5.0
"""Assumed seconds from the start of a worker to its first step. They count as part of the cost of a kill."""
SETTLE_S = 2.0
"""A process that has recovered from a fault gets no further fault for this many seconds."""
KILL_SHARE = 0.7
"""Share of all faults that kill; the others freeze."""
SHARD_SHARE = 0.2
"""Minimum share of all faults that hit shards. Shards are few, but only they can lose merged work."""


class FaultKind(Enum):
    KILL = "kill"  # SIGKILL; the process is started again after a while
    FREEZE = "freeze"  # SIGSTOP; SIGCONT follows after a while


TIMES = {
    FaultKind.KILL: (0.2, 2.0),
    FaultKind.FREEZE: (1.0, 10.0),
}
"""Shortest and longest duration of a shard's fault, in seconds."""


@dataclass(frozen=True)
class Fault:
    at_s: float
    """Seconds after the beginning of the measured time."""
    kind: FaultKind
    target: str
    """Name of a process."""
    for_s: float
    """Seconds until the process is started again, or resumed."""

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.kind.value:6}  {self.target:10}  for {self.for_s:.1f} s"


def make_plan(
    *,
    seed: int,
    seconds: float,
    every_s: float,
    shards: Sequence[str],
    workers: Sequence[str],
    dead_share: float,
) -> tuple[Fault, ...]:
    """One fault in every interval of `every_s`, at a random moment. It hits a healthy process.

    `seconds`: the measured time; a fault may last longer. `dead_share`: the share of all worker-seconds for which
    workers should be dead or frozen.
    """
    chance = random.Random(seed)
    shard_share = max(SHARD_SHARE, len(shards) / (len(shards) + len(workers)))
    drafts = []
    for interval in range(round(seconds / every_s)):
        at_s = (interval + chance.uniform(0.1, 0.9)) * every_s
        kind = FaultKind.KILL if chance.random() < KILL_SHARE else FaultKind.FREEZE
        to_shard = chance.random() < shard_share
        away_s = chance.uniform(*(TIMES[kind] if to_shard else (0.5, 1.5)))  # a worker's is stretched below
        drafts.append((Fault(at_s, kind, "", away_s), to_shard))
    absences = [fault for fault, to_shard in drafts if not to_shard]
    stretch = _stretch(absences, seconds, dead_share * len(workers))
    plan, busy_until = [], dict.fromkeys([*shards, *workers], 0.0)
    for fault, to_shard in drafts:
        names = shards if to_shard else workers
        well = [name for name in names if busy_until[name] <= fault.at_s]
        if fault.at_s >= seconds or len(well) < (1 if to_shard else 2):  # at least one worker stays well
            continue
        target = chance.choice(well)
        away_s = fault.for_s if to_shard else fault.for_s * stretch
        start_s = START_S if fault.kind is FaultKind.KILL else 0.0
        busy_until[target] = fault.at_s + max(away_s, start_s) + SETTLE_S
        for_s = away_s if to_shard else max(0.2, away_s - start_s)
        plan.append(replace(fault, target=target, at_s=round(fault.at_s, 2), for_s=round(for_s, 2)))
    return tuple(plan)


def _stretch(faults: Sequence[Fault], seconds: float, dead_share: float) -> float:
    """The factor by which to stretch all durations so that they add up to this share of the measured time."""
    if not faults:
        return 1.0
    low, high = 0.0, seconds / 3.0  # no absence is longer than half the measured time
    for _ in range(50):
        middle = (low + high) / 2
        dead_s = sum(min(middle * fault.for_s, seconds - fault.at_s) for fault in faults)
        low, high = (middle, high) if dead_s < dead_share * seconds else (low, middle)
    return low


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected. Times are monotonic seconds, as in the histories."""

    kind: str
    """Value of a FaultKind."""
    target: str
    began: float
    ended: float
    """When the process was started again, or resumed."""


@dataclass
class ChaosRun:
    """One run of a cluster, seen from outside."""

    began: float = 0.0
    """When every worker trained, and the measured time began. Monotonic."""
    ended: float = 0.0
    """When the measured time was over."""
    faults: list[InjectedFault] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    """Messages about processes that ended by themselves, or made no progress at the end."""
    healed_s: float | None = None
    """Seconds from the last fault until every worker and every shard had made progress; None: some did not."""


READY_S = 2 * LONG_S
"""Every worker must train within this time from the start; every process must make progress within `LONG_S` of the
last fault."""


class ChaosCluster:
    def __init__(
        self, settings: Settings, files: ClusterFolder, supervisor: Supervisor, interrupts: Interrupts,
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        assert settings.run.history is not None
        self._settings, self._files, self._history = settings, files, settings.run.history
        self._supervisor, self._interrupts, self._tell = supervisor, interrupts, tell
        self._children = Children(settings, files, Programs())
        self._run = ChaosRun()
        self._frozen: list[tuple[float, str, float]] = []  # end of the freeze, name, start of the freeze

    def run(self, plan: Sequence[Fault], seconds: float) -> ChaosRun:
        """Start the cluster, inject faults for `seconds` while it trains, let it heal, and stop it.
        Raises DilocoError, or KeyboardInterrupt if the user asks to stop."""
        run = self._run
        save(self._settings, self._files.settings)
        self._start()
        run.began = time.monotonic()
        run.ended = run.began + seconds
        left = list(plan)
        while (now := time.monotonic()) < run.ended:
            while left and now >= run.began + left[0].at_s:
                self._inject(left.pop(0), now)
            self._supervise(now)
            self._wait()
        self._heal()
        self._supervisor.stop(set(self._children.workers), END_S)
        self._supervisor.stop(set(self._children.shards), END_S)
        write_json(self._files.folder / "run.json", asdict(run))
        return run

    # ------------------------------------------------------------ phases

    def _start(self) -> None:
        deadline = time.monotonic() + READY_S
        for index in range(len(self._children.shards)):
            self._supervisor.start(self._children.shard(index))
        while not self._children.shards_are_up:
            self._until_ready(deadline)
            for name in self._children.shards:
                if (found := self._supervisor.endpoints(name)) is not None:
                    self._children.found(name, found)
        for index in range(len(self._children.workers)):
            self._supervisor.start(self._children.worker(index))
        while not all(self._grew(name, "stepped") for name in self._children.workers):
            self._until_ready(deadline)

    def _until_ready(self, deadline: float) -> None:
        self._supervise(time.monotonic())
        if time.monotonic() > deadline or self._run.exits:
            why = "; ".join(self._run.exits) or f"not every worker trained within {READY_S:.0f} s"
            raise DilocoError(f"the cluster did not come up: {why}; its logs are in {self._files.logs}")
        self._wait()

    def _heal(self) -> None:
        """End all faults, and wait until every process makes progress."""
        run = self._run
        now = time.monotonic()
        self._thaw(now, all_of_them=True)
        for name in self._supervisor.waiting():
            self._supervisor.kill_for(name, 0.0)
        marks = {name: len(self._written(name)) for name in (*self._children.workers, *self._children.shards)}
        progressed: set[str] = set()
        while (
            run.healed_s is None or time.monotonic() < now + run.healed_s + SETTLE_S
        ):  # all work of the measured time is merged
            if run.healed_s is None and time.monotonic() > now + LONG_S:
                late = ", ".join(sorted(marks.keys() - progressed))
                run.exits.append(f"{late} made no progress within {LONG_S:.0f} s after the last fault")
                return
            self._supervise(time.monotonic())
            self._wait()
            for name in marks.keys() - progressed:
                if self._grew(name, "announced" if name in self._children.shards else "stepped", marks[name]):
                    progressed.add(name)
            if progressed == marks.keys() and run.healed_s is None:
                run.healed_s = round(time.monotonic() - now, 2)

    # ------------------------------------------------------------ faults

    def _inject(self, fault: Fault, now: float) -> None:
        self._tell(str(fault))
        if fault.kind is FaultKind.KILL:
            self._supervisor.kill_for(fault.target, fault.for_s)
            self._run.faults.append(InjectedFault(fault.kind.value, fault.target, now, now + fault.for_s))
        else:
            self._supervisor.signal(fault.target, signal.SIGSTOP)
            self._frozen.append((now + fault.for_s, fault.target, now))

    def _thaw(self, now: float, *, all_of_them: bool = False) -> None:
        """Resume the frozen processes whose time is over."""
        over = [one for one in self._frozen if all_of_them or now >= one[0]]
        self._frozen = [one for one in self._frozen if one not in over]
        for _, name, began in over:
            self._supervisor.signal(name, signal.SIGCONT)
            self._run.faults.append(InjectedFault(FaultKind.FREEZE.value, name, began, now))

    def _supervise(self, now: float) -> None:
        self._thaw(now)
        for exit in self._supervisor.look(now):
            self._run.exits.append(f"{exit.name} ended by itself: {exit.verdict.why}; its log is {exit.log}")
            self._tell(self._run.exits[-1])
        self._supervisor.start_due(now)

    def _wait(self) -> None:
        self._interrupts.wait(LOOK_S / 5)
        if self._interrupts.count:
            raise KeyboardInterrupt

    # ------------------------------------------------------------ histories, while they grow

    def _written(self, name: str, since: int = 0) -> bytes:
        """The history, after its first `since` bytes."""
        path = self._history / f"{name}.jsonl"
        if not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(since)
            return file.read()

    def _grew(self, name: str, what: str, since: int = 0) -> bool:
        """Whether the history has a line `what` after its first `since` bytes."""
        return f'"what":"{what}"'.encode() in self._written(name, since)
