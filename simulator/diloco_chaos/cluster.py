"""Runs a local cluster for a while and injects the faults of a plan. Everything here runs on the main thread."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from diloco_chaos.plan import LINK, SETTLE_S, ChaosRun, Fault, FaultKind, InjectedFault
from diloco_common.errors import ConfigError, DilocoError
from diloco_common.settings import Settings
from diloco_common.settings_loader import save
from diloco_common.wire.addresses import write_json
from diloco_deploy import LOOK_S
from diloco_deploy.run.folder import ClusterFolder
from diloco_deploy.run.members import Children, Programs
from diloco_deploy.run.supervisor import DRAIN_S, Interrupts, Supervisor

DISK_MIB = 64
_BALLAST = "ballast"
_NEW_MOUNTS = 0x00020000
"""CLONE_NEWNS. (os.unshare exists only from Python 3.12 on.)"""


class SmallDisks:
    """One disk per shard: tmpfs, in a mount namespace."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """Mount a disk at each folder. `folders`: name of a shard -> its data folder. Raises ConfigError."""
        self._folders = dict(folders)
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) != 0:
            raise _refused(os.strerror(ctypes.get_errno()))
        _mount("--make-rprivate", "/")
        for folder in self._folders.values():
            folder.mkdir(parents=True, exist_ok=True)
            _mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "diloco-chaos", str(folder))

    def fill(self, name: str) -> None:
        """Use up the disk to its last byte."""
        with (self._folders[name] / _BALLAST).open("wb", buffering=0) as ballast:
            chunk = bytes(1 << 20)
            while chunk:
                try:
                    ballast.write(chunk)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    chunk = chunk[: len(chunk) // 2]

    def free(self, name: str) -> None:
        """Make room on the disk again."""
        with contextlib.suppress(FileNotFoundError):
            (self._folders[name] / _BALLAST).unlink()


def _mount(*arguments: str) -> None:
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise _refused(str(error)) from None
    if done.returncode != 0:
        raise _refused(done.stderr.strip())


def _refused(why: str) -> ConfigError:
    return ConfigError(f"--disk-full cannot mount its small disks here ({why}): run as root, or leave out --disk-full")


_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET. (os.unshare exists only from Python 3.12 on.)"""
LISTEN = "0.0.0.0:0"
"""The address of shards. Nobody outside the namespace can reach it."""
_RULES = """
table inet diloco {
  set cut { type ipv4_addr . inet_service; }
  chain output {
    type filter hook output priority 0;
    ip daddr . tcp dport @cut drop
    ip saddr . tcp sport @cut drop
  }
}
"""


class NoLinks(Exception):
    """Links cannot be cut here. The message says why."""


class Links:
    """All network links of a cluster. Each worker dials the shards at a loopback address of its own, so that a rule
    can tell the links of different workers apart.

    Make it in the main thread: this thread enters the namespace, and so does every process that it starts later.
    """

    def __init__(self) -> None:
        """Raises NoLinks."""
        # Try in a child first, because this process cannot leave the namespace again.
        _run("unshare", "--net", "sh", "-c", "ip link set lo up && nft -f -", given=_RULES)
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
            raise NoLinks(os.strerror(ctypes.get_errno()))
        _run("ip", "link", "set", "lo", "up")
        _run("nft", "-f", "-", given=_RULES)

    @staticmethod
    def host(worker: int) -> str:
        """The address at which worker number `worker` reaches every shard."""
        return f"127.1.{worker // 250}.{worker % 250 + 1}"

    def cut(self, worker: int, port: int) -> None:
        """Block all traffic between a worker and the shard that listens on `port`, in both directions."""
        self._element("add", worker, port)

    def heal(self, worker: int, port: int) -> None:
        """Let traffic through again."""
        self._element("delete", worker, port)

    def _element(self, verb: str, worker: int, port: int) -> None:
        _run("nft", verb, "element", "inet", "diloco", "cut", f"{{ {self.host(worker)} . {port} }}")


def _run(*command: str, given: str = "") -> None:
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    except OSError:
        raise NoLinks(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        raise NoLinks(f"{' '.join(command)}: {done.stderr.strip()}")


HEAL_S = 60.0
"""Every process must make progress within this many seconds after the last fault."""
READY_S = 2 * HEAL_S
"""The same from the start of the cluster, until every worker trains."""


class ChaosCluster:
    def __init__(
        self, settings: Settings, files: ClusterFolder, supervisor: Supervisor, interrupts: Interrupts,
        tell: Callable[[str], None], disks: SmallDisks | None = None, links: Links | None = None,
    ) -> None:  # fmt: skip
        """`disks` and `links` are needed if a plan fills disks or cuts links."""
        assert settings.run.history is not None
        self._settings, self._files, self._history = settings, files, settings.run.history
        self._supervisor, self._interrupts, self._tell = supervisor, interrupts, tell
        self._children = Children(settings, files, Programs())
        self._disks, self._links = disks, links
        self._run = ChaosRun()
        self._active: list[tuple[float, Fault, float]] = []  # faults to lift: when, which, and when it began

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
            self._supervisor.start(self._children.worker(index, self._links.host(index) if self._links else ""))
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
        self._lift(now, all_of_them=True)
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
        match fault.kind:
            case FaultKind.KILL:
                self._supervisor.kill_for(fault.target, fault.for_s)
                self._run.faults.append(InjectedFault(fault.kind.value, fault.target, now, now + fault.for_s))
                return
            case FaultKind.FREEZE:
                self._supervisor.signal(fault.target, signal.SIGSTOP)
            case FaultKind.FILL:
                assert self._disks is not None
                self._disks.fill(fault.target)
            case FaultKind.CUT:
                assert self._links is not None
                self._links.cut(*self._link(fault.target))
        self._active.append((now + fault.for_s, fault, now))

    def _link(self, name: str) -> tuple[int, int]:
        """The two ends of a link: the number of the worker and the port of the shard."""
        worker, shard = name.split(LINK)
        return self._children.workers.index(worker), self._children.port(shard)

    def _lift(self, now: float, *, all_of_them: bool = False) -> None:
        """End the faults whose time is over."""
        over = [one for one in self._active if all_of_them or now >= one[0]]
        self._active = [one for one in self._active if one not in over]
        for _, fault, began in over:
            if fault.kind is FaultKind.FILL:
                assert self._disks is not None
                self._disks.free(fault.target)
            elif fault.kind is FaultKind.CUT:
                assert self._links is not None
                self._links.heal(*self._link(fault.target))
            else:
                self._supervisor.signal(fault.target, signal.SIGCONT)
            self._run.faults.append(InjectedFault(fault.kind.value, fault.target, began, now))

    def _supervise(self, now: float) -> None:
        self._lift(now)
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
