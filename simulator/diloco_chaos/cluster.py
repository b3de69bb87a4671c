"""Runs a local cluster for a while and injects the faults of a plan. Everything here runs on the main thread."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from diloco_chaos.plan import SETTLE_S, ChaosRun, Fault, FaultKind, InjectedFault
from diloco_common.errors import DilocoError
from diloco_common.settings import Settings
from diloco_common.settings_loader import save
from diloco_common.wire.addresses import write_json
from diloco_deploy import LOOK_S
from diloco_deploy.run.folder import ClusterFolder
from diloco_deploy.run.members import Children, Programs
from diloco_deploy.run.supervisor import DRAIN_S, Interrupts, Supervisor

HEAL_S = 60.0
"""Every process must make progress within this many seconds after the last fault."""
READY_S = 2 * HEAL_S
"""The same from the start of the cluster, until every worker trains."""


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
        self._frozen: list[tuple[float, str, float]] = []  # until when, who, and since when

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
        self._supervisor.stop(set(self._children.workers), DRAIN_S)
        self._supervisor.stop(set(self._children.shards), DRAIN_S)
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
            if run.healed_s is None and time.monotonic() > now + HEAL_S:
                late = ", ".join(sorted(marks.keys() - progressed))
                run.exits.append(f"{late} made no progress within {HEAL_S:.0f} s after the last fault")
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
        """Let those go on whose time is over."""
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
