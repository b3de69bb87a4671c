"""Keeps a learner in one process, and in one thread at a time.

A forked child has a copy of the learner without its threads and connections. A spawned child may run the user's script
again, including `join`: a DataLoader with spawned workers does so if the script has no `if __name__ == "__main__":`. An
environment variable tells the children of a process which learners it runs.

Calls of the training loop come one at a time: a learner and its model belong to one thread. The thread may change, as
in a notebook, but two must not call at once. Nested calls are fine.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

from diloco_common import forks
from diloco_common.errors import WrongCall

MARK = "_DILOCO_LEARNERS"
"""PID RUN/ID RUN/ID...: the learners of that process."""
_GUARD = 'put what the script runs under `if __name__ == "__main__":`'

P = ParamSpec("P")
T = TypeVar("T")


class Home:
    """Remembers the process in which something was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self, learner_id: str) -> None:
        """Raises WrongCall in another process."""
        if not self.is_here:
            raise WrongCall(
                f"this process is a child of the learner {learner_id} (process {self._pid}), which alone may call this"
            )


class Closable(Protocol):
    def close(self) -> None:
        """Leave the run."""


_first_join: Home | None = None
_here: list[str] = []
_learners: WeakValueDictionary[str, Closable] = WeakValueDictionary()
"""By the names in `_here`."""


def check_may_join(run: str, learner_id: str) -> None:
    """Raises WrongCall if `learner_id` would join from a learner's child process, in its place or beside it."""
    global _first_join
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise WrongCall(
            f"process {os.getpid()} was spawned by this script, and runs it again from its first line: " + _GUARD
        )
    if _first_join is not None and not _first_join.is_here:
        raise WrongCall(
            f"{learner_id} cannot join from a process that was forked from a learner; join there before it forks, or "
            'start this one with multiprocessing.get_context("spawn") or by subprocess'
        )
    pid, *learners = os.environ.get(MARK, "0").split(" ")
    if f"{run}/{learner_id}" in learners and pid != str(os.getpid()) and int(pid) in _ancestors():
        raise WrongCall(
            f"process {os.getpid()} is a child of process {pid}, which is {learner_id} already: {_GUARD}, or give a "
            "learner of its own another learner_id"
        )
    _first_join = _first_join or Home()


def joined(run: str, learner_id: str, learner: Closable) -> None:
    _here.append(f"{run}/{learner_id}")
    _learners[f"{run}/{learner_id}"] = learner
    _mark()


def close_earlier(run: str, learner_id: str) -> None:
    """Close a learner that joined here under this name: a notebook's cell was run again."""
    if (name := f"{run}/{learner_id}") in _here and (earlier := _learners.get(name)) is not None:
        earlier.close()


def left(run: str, learner_id: str) -> None:
    """This process no longer runs this learner. May be repeated."""
    if (name := f"{run}/{learner_id}") in _here:
        _here.remove(name)
        _mark()


def _mark() -> None:
    forks.refuse(bool(_here))
    if _here:
        os.environ[MARK] = " ".join([str(os.getpid()), *_here])
    else:
        os.environ.pop(MARK, None)


def _ancestors() -> set[int]:
    """This process's ancestors. Without /proc, the parent alone."""
    found, pid = set[int](), os.getppid()
    while pid > 1 and pid not in found:
        found.add(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return found


class OneThread:
    """Refuses calls from two threads at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder = ""

    def enter(self, what: str) -> None:
        """Raises WrongCall while another thread is inside a call."""
        if not self._lock.acquire(blocking=False):
            raise WrongCall(
                f"{what}() in thread {threading.current_thread().name}, while {self._holder} is inside a call of this "
                "learner: let one thread train, and call step, poll, finish and leave there"
            )
        self._holder = f"thread {threading.current_thread().name}"

    def leave(self) -> None:
        self._lock.release()


class _Owned(Protocol):
    one_thread: OneThread


Owner = TypeVar("Owner", bound=_Owned)


def one_thread(call: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Decorator: the method must not be called from two threads at once."""
    name = call.__name__

    @functools.wraps(call)
    def called(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.one_thread.enter(name)
        try:
            return call(self, *args, **kwargs)
        finally:
            self.one_thread.leave()

    return called
