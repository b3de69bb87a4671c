"""Supervises child processes: starts them, restarts them when they die, and never leaves one behind.

The pure function `verdict_on_exit` decides what a death means. Each child has its own POSIX session (setsid), so Ctrl-C
reaches only us. Children end with us even if we are killed (`diloco_common.process`). `Hanging` finds live processes
that do nothing, and `Interrupts` counts signals that ask us to end.
"""

from __future__ import annotations

import enum
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

from diloco_common.errors import EXIT_REFUSED, EXIT_UNEXPECTED
from diloco_common.wire.addresses import Endpoints, read_address
from diloco_common.wire.calls import LONG_S
from diloco_deploy import ASK_S, LOOK_S

DEATHS_MAX = 5
"""After more deaths in a row, a child is not started again."""

Kind = Literal["shard", "worker", "job"]


class Action(enum.Enum):
    ENDED = "ended"  # it finished its work
    AGAIN = "again"  # start it again after a while
    LOST = "lost"  # go on without it
    FAIL = "fail"  # the cluster cannot go on


@dataclass(frozen=True)
class Verdict:
    action: Action
    why: str
    wait_s: float = 0.0
    """Seconds before the child is started again."""
    exit_code: int = 0
    """Exit code of `diloco up` if the cluster cannot go on."""


def verdict_on_exit(kind: Kind, code: int, *, was_up: bool, deaths: int, out_of_memory: bool = False) -> Verdict:
    """Decide what a child's exit means. A shard never ends by itself; a worker ends when the budget is reached.

    `code`: as in `subprocess.Popen`. `was_up`: any process of the child had bound its ports. `deaths`: in a row,
    including this one. `out_of_memory`: the kernel has killed a process for lack of memory since the last exit.
    """
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    if out_of_memory and code == -signal.SIGKILL:
        how += ": the machine or its container ran out of memory"
    if code == 0 and kind != "shard":
        return Verdict(Action.ENDED, "ended")
    failed = Verdict(Action.FAIL, f"failed ({how})", exit_code=code if code > 0 else EXIT_UNEXPECTED)
    if kind == "job" or (not was_up and code > 0):
        return failed
    if kind == "worker" and code == EXIT_REFUSED:  # it was admitted before
        return Verdict(Action.LOST, f"was refused ({how}), and is not started again", exit_code=code)
    if deaths > DEATHS_MAX:
        return Verdict(Action.FAIL, f"died {deaths} times in a row ({how})", exit_code=failed.exit_code)
    return Verdict(Action.AGAIN, f"died ({how})", wait_s=min(0.5 * 2 ** (deaths - 1), 10.0))


def memory_kills() -> int:
    """Number of processes that the kernel has killed for lack of memory since boot; 0 if unknown."""
    try:
        counted = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(counted[1]) if counted else 0


@dataclass(frozen=True)
class ChildSpec:
    """How to start one child. A child writes its `address_file` once it is up; a job has none."""

    name: str
    kind: Kind
    module: str
    arguments: Callable[[], Sequence[str]]
    """Called at every start: a restarted process may get the ports of the first."""
    log: Path
    address_file: Path | None = None


@dataclass
class _Child:
    spec: ChildSpec
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    deaths: int = 0
    was_up: bool = False
    start_again_at: float | None = None  # set while it is dead and will be started again


@dataclass(frozen=True)
class Exit:
    name: str
    kind: Kind
    log: Path
    verdict: Verdict


class Supervisor:
    """The child processes of one command. Use it in the main thread: children end with the thread that started them."""

    def __init__(self) -> None:
        self._children: dict[str, _Child] = {}
        self._memory_kills = memory_kills()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, spec: ChildSpec) -> None:
        spec.log.unlink(missing_ok=True)
        self._children[spec.name] = child = _Child(spec)
        self._spawn(child)

    def endpoints(self, name: str) -> Endpoints | None:
        child = self._children[name]
        if child.process is None or child.spec.address_file is None:
            return None
        found = read_address(child.spec.address_file)
        if found is None or found.pid != child.process.pid:
            return None
        child.was_up = True
        return found

    def pid(self, name: str) -> int | None:
        process = self._children[name].process
        return process.pid if process else None

    def signal(self, name: str, number: signal.Signals) -> None:
        if (process := self._children[name].process) is not None:
            _signal(process, number)

    def kill_for(self, name: str, dead_s: float) -> None:
        """Kill a child on purpose. `start_due` restarts it after `dead_s` seconds."""
        child = self._children[name]
        self._kill([child])
        child.start_again_at = time.monotonic() + dead_s

    def names(self) -> set[str]:
        return set(self._children)

    def look(self, now: float) -> list[Exit]:
        """Find the children that have exited, and judge their exits. `start_due` restarts them."""
        exits = []
        for name, child in self._children.items():
            if child.process is None or not _has_exited(child.process):
                continue
            self.endpoints(name)  # it may have come up and died since the last look
            code = _reap(child.process)
            child.process = None
            child.deaths = 1 if now - child.started_at > LONG_S else child.deaths + 1
            kills_before, self._memory_kills = self._memory_kills, memory_kills()
            verdict = verdict_on_exit(
                child.spec.kind, code, was_up=child.was_up, deaths=child.deaths,
                out_of_memory=self._memory_kills > kills_before,
            )  # fmt: skip
            if verdict.action is Action.AGAIN:
                child.start_again_at = now + verdict.wait_s
            exits.append(Exit(name, child.spec.kind, child.spec.log, verdict))
        return exits

    def start_due(self, now: float) -> list[str]:
        """Restart the dead children whose wait is over. Returns their names."""
        due = [
            name for name, one in self._children.items() if one.start_again_at is not None and now >= one.start_again_at
        ]
        for name in due:
            self._spawn(self._children[name])
        return due

    def waiting(self) -> set[str]:
        return {name for name, child in self._children.items() if child.start_again_at is not None}

    def stop(self, names: Iterable[str], grace_s: float, hurry: Callable[[], bool] = lambda: False) -> list[str]:
        """Ask children to end (SIGTERM). Kill those that are left after `grace_s`, or once `hurry` returns true.

        Returns the names of the killed children.
        """
        children = []
        for name in names:
            self.dismiss(name)
            children.append(self._children[name])
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and not hurry():
            for child in children:
                if child.process is not None and _has_exited(child.process):
                    _reap(child.process)
                    child.process = None
            if all(child.process is None for child in children):
                return []
            time.sleep(LOOK_S / 2)
        killed = [child.spec.name for child in children if child.process is not None]
        self._kill(children)
        return killed

    def dismiss(self, name: str) -> None:
        """Ask a child to end (SIGTERM), and do not start it again. `look` reports its exit."""
        self._children[name].start_again_at = None
        self.signal(name, signal.SIGTERM)

    def forget(self, name: str) -> None:
        self._kill([self._children.pop(name)])

    def kill(self) -> None:
        self._kill(self._children.values())

    def _kill(self, children: Iterable[_Child]) -> None:
        for child in children:
            child.start_again_at = None
            if child.process is not None:
                _signal(child.process, signal.SIGKILL)
        for child in children:
            if child.process is not None:
                _reap(child.process)
                child.process = None

    def _spawn(self, child: _Child) -> None:
        spec = child.spec
        if spec.address_file is not None:
            spec.address_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "diloco_common.process", str(os.getpid()), spec.module, *spec.arguments()]
        with spec.log.open("ab") as log:
            child.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        child.started_at = time.monotonic()
        child.start_again_at = None


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has exited. Leaves its exit status in place, so its process group cannot be reused yet."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _reap(process: subprocess.Popen[bytes]) -> int:
    """Kill all processes that the child may have started, then take its exit status."""
    while not _has_exited(process):
        time.sleep(LOOK_S / 10)
    _signal(process, signal.SIGKILL)
    return process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the child alone; SIGKILL also goes to everything it has started."""
    try:
        if number is signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has just ended


class Interrupts:
    """Counts the signals that ask us to end: Ctrl-C, SIGTERM, and the hangup of the terminal."""

    def __init__(self) -> None:
        self.count = 0
        self._wake = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Sleep until the next interrupt, or for `seconds`."""
        self._wake.wait(seconds)
        self._wake.clear()


LOOKS_WITHIN_S = 2 * ASK_S
"""A longer pause between looks does not count as silence."""


class Hanging:
    """Finds processes that hang: they are alive, but do not answer, or report no progress. Pure: times are passed in.

    Only time in which we looked counts: if this process was stopped, or the machine slept, no process hangs.
    """

    def __init__(self) -> None:
        self._heard_at: dict[str, float] = {}
        self._hung: set[str] = set()
        self._looked_at: float | None = None

    def heard(self, name: str, now: float, *, is_hung: bool) -> None:
        """A process answered. `is_hung`: it reports that its training thread makes no progress."""
        self._heard_at[name] = now
        if is_hung:
            self._hung.add(name)

    def look(self, names: Iterable[str], now: float) -> dict[str, str]:
        """The processes in `names` that hang, and why. Each is reported once. Their ports must be bound."""
        if self._looked_at is not None and (gap := now - self._looked_at) > LOOKS_WITHIN_S:
            self._heard_at = {name: at + gap for name, at in self._heard_at.items()}
        self._looked_at = now
        self._heard_at = {name: self._heard_at.get(name, now) for name in names}
        found = {}
        for name, at in self._heard_at.items():
            if name in self._hung:
                found[name] = "its training thread makes no progress (worker.hung_s)"
            elif now - at > LONG_S:
                found[name] = f"it has not answered for {now - at:.0f} s"
        for name in found:
            del self._heard_at[name]
        self._hung.clear()
        return found
