"""Runs a local cluster for a while, and carries out what a plan says. Everything here runs on the main thread."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diloco_common.endpoints import write_json
from diloco_common.errors import DilocoError
from diloco_common.settings import Settings
from diloco_common.settings_loader import save
from diloco_deploy.chaos.disks import SmallDisks
from diloco_deploy.chaos.links import Links
from diloco_deploy.chaos.plan import LINK, Fault, Harm
from diloco_deploy.children import Children, Programs
from diloco_deploy.folder import Files
from diloco_deploy.interrupts import Interrupts
from diloco_deploy.supervisor import Supervisor

_TICK_S = 0.02
_READY_S = 120.0
"""Seconds that the cluster has until every worker trains."""
_TAIL_S = 3.0
"""Seconds that everybody goes on for after that: so what was trained in the measured time is merged."""
_DRAIN_S = 20.0


class NeverReady(DilocoError):
    """The cluster did not come up."""

    code = "CHAOS_NOT_READY"


@dataclass(frozen=True)
class Deed:
    """What was done to a process; times are monotonic seconds, as in the histories."""

    harm: str
    """"kill", "freeze", "fill" or "cut"."""
    target: str
    began: float
    ended: float
    """When it was started again, went on, had room again, or was connected again."""


@dataclass
class Course:
    """What happened to a cluster from outside."""

    began: float = 0.0
    """When every worker trained; monotonic."""
    ended: float = 0.0
    """When the measured time was over."""
    deeds: list[Deed] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    """Processes that ended though nobody asked them to, in words."""
    healed_s: float | None = None
    """Seconds after the last fault until every worker and every shard got on; none: that did not come."""


class HurtCluster:
    """One cluster, from its first process to its last."""

    def __init__(
        self,
        settings: Settings,
        files: Files,
        supervisor: Supervisor,
        interrupts: Interrupts,
        tell: Callable[[str], None],
        disks: SmallDisks | None = None,
        links: Links | None = None,
    ) -> None:
        """`disks` and `links` are needed where a plan fills or cuts them."""
        assert settings.run.history is not None
        self._settings, self._files, self._history = settings, files, settings.run.history
        self._supervisor, self._interrupts, self._tell = supervisor, interrupts, tell
        self._children = Children(settings, files, Programs())
        self._disks, self._links = disks, links
        self._course = Course()
        self._open: list[tuple[float, Deed]] = []  # what ends by itself, and when

    def run(self, plan: Sequence[Fault], seconds: float, heal_s: float) -> Course:
        """Bring it up, let it train for `seconds` while the plan is carried out, let it heal, and end it.

        Raises NeverReady, or KeyboardInterrupt if somebody asks us to end.
        """
        course = self._course
        save(self._settings, self._files.settings)
        self._start()
        course.began = time.monotonic()
        course.ended = course.began + seconds
        left = list(plan)
        while (now := time.monotonic()) < course.ended:
            while left and now >= course.began + left[0].at_s:
                self._hurt(left.pop(0), now)
            self._look_after(now)
            self._wait()
        self._heal(heal_s)
        self._supervisor.stop(set(self._children.workers), _DRAIN_S)
        self._supervisor.stop(set(self._children.shards), _DRAIN_S)
        write_json(self._files.folder / "course.json", asdict(course))
        return course

    # ------------------------------------------------------------ phases

    def _start(self) -> None:
        deadline = time.monotonic() + _READY_S
        for index in range(len(self._children.shards)):
            self._supervisor.start(self._children.shard(index))
        while not self._children.shards_are_up:
            self._until_ready(deadline)
            for name in self._children.shards:
                if (found := self._supervisor.endpoints(name)) is not None:
                    self._children.found(name, found)
        for index in range(len(self._children.workers)):
            self._supervisor.start(self._children.worker(index, self._links.host(index) if self._links else ""))
        while not all(self._grew(name, "stepped") for name in self._children.workers):
            self._until_ready(deadline)

    def _until_ready(self, deadline: float) -> None:
        self._look_after(time.monotonic())
        if time.monotonic() > deadline or self._course.exits:
            why = "; ".join(self._course.exits) or f"not every worker trained after {_READY_S:.0f} s"
            raise NeverReady(f"the cluster did not come up: {why}; see {self._files.logs}")
        self._wait()

    def _heal(self, heal_s: float) -> None:
        """End what is being done, and see whether everybody gets on."""
        course = self._course
        now = time.monotonic()
        self._end(now, all_of_them=True)
        for name in self._supervisor.waiting():
            self._supervisor.kill_for(name, 0.0)
        marks = {name: self._size(name) for name in (*self._children.workers, *self._children.shards)}
        grown: set[str] = set()
        while course.healed_s is None or time.monotonic() < now + course.healed_s + _TAIL_S:
            if course.healed_s is None and time.monotonic() > now + heal_s:
                late = ", ".join(sorted(marks.keys() - grown))
                course.exits.append(f"{late} did not get on within {heal_s:.0f} s after the last fault")
                return
            self._look_after(time.monotonic())
            self._wait()
            for name in marks.keys() - grown:
                if self._grew(name, "announced" if name in self._children.shards else "stepped", marks[name]):
                    grown.add(name)
            if grown == marks.keys() and course.healed_s is None:
                course.healed_s = round(time.monotonic() - now, 2)

    # ------------------------------------------------------------ faults

    def _hurt(self, fault: Fault, now: float) -> None:
        self._tell(str(fault))
        match fault.harm:
            case Harm.KILL:
                self._supervisor.kill_for(fault.target, fault.for_s)
                self._course.deeds.append(Deed("kill", fault.target, now, now + fault.for_s))
            case Harm.FREEZE:
                self._supervisor.signal(fault.target, signal.SIGSTOP)
                self._open.append((now + fault.for_s, Deed("freeze", fault.target, now, 0.0)))
            case Harm.FILL:
                assert self._disks is not None
                self._disks.fill(fault.target)
                self._open.append((now + fault.for_s, Deed("fill", fault.target, now, 0.0)))
            case Harm.CUT:
                assert self._links is not None
                self._links.cut(*self._link(fault.target))
                self._open.append((now + fault.for_s, Deed("cut", fault.target, now, 0.0)))

    def _link(self, name: str) -> tuple[int, int]:
        """Number of the worker and port of the shard that it joins."""
        worker, shard = name.split(LINK)
        return self._children.workers.index(worker), self._children.port(shard)

    def _end(self, now: float, *, all_of_them: bool = False) -> None:
        over = [one for one in self._open if all_of_them or now >= one[0]]
        self._open = [one for one in self._open if one not in over]
        for _, deed in over:
            if deed.harm == "fill":
                assert self._disks is not None
                self._disks.free(deed.target)
            elif deed.harm == "cut":
                assert self._links is not None
                self._links.heal(*self._link(deed.target))
            else:
                self._supervisor.signal(deed.target, signal.SIGCONT)
            self._course.deeds.append(Deed(deed.harm, deed.target, deed.began, now))

    def _look_after(self, now: float) -> None:
        self._end(now)
        for exit in self._supervisor.look(now):
            self._course.exits.append(f"{exit.name} ended by itself: {exit.verdict.why}; its log: {exit.log}")
            self._tell(self._course.exits[-1])
        self._supervisor.start_due(now)

    def _wait(self) -> None:
        self._interrupts.wait(_TICK_S)
        if self._interrupts.count:
            raise KeyboardInterrupt

    # ------------------------------------------------------------ histories, while they grow

    def _path(self, name: str) -> Path:
        return self._history / f"{name}.jsonl"

    def _size(self, name: str) -> int:
        path = self._path(name)
        return path.stat().st_size if path.exists() else 0

    def _grew(self, name: str, what: str, since: int = 0) -> bool:
        """Whether the history says `what` after its first `since` bytes."""
        if not self._path(name).exists():
            return False
        with self._path(name).open("rb") as file:
            file.seek(since)
            return f'"what":"{what}"'.encode() in file.read()


def course_from(found: dict[str, Any]) -> Course:
    """What `run` has written to course.json."""
    return Course(**{**found, "deeds": [Deed(**deed) for deed in found["deeds"]]})
