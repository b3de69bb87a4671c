"""A learner and its process: it lives in one process and one thread at a time, and can be ended from outside the loop.

A forked child has a copy of the learner without its threads and connections. A spawned child may run the user's script
again, including `join`: a DataLoader with spawned workers does so if the script has no `if __name__ == "__main__":`. An
environment variable tells the children of a process which learners it runs.

Calls of the training loop come one at a time: a learner and its model belong to one thread. The thread may change, as
in a notebook, but two must not call at once. Nested calls are fine.

SIGTERM: the machine is about to go away, or somebody ends this process. If nobody else handles the signal, the learner
hands over its work at its next step boundary (`Learner.leave`), and then raises `SystemExit(143)`, so that `with` and
`finally` blocks run. If the step is too long to wait for, the same error interrupts it, and `with learner:` then hands
over the work of the steps before.

Ctrl-C: an uncaught `KeyboardInterrupt` would print the whole stack, which does not help the person at the keyboard. We
raise another error instead, which `except KeyboardInterrupt` still catches. If nobody does, the exit code is 130.

If an error of ours is not caught, its message and code are printed on stderr, with the line of the script instead of
the stack. All other errors keep their tracebacks.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

from diloco_common import forks
from diloco_common.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, DilocoError, WrongCall, one_line

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
"""Name, as in `_here` -> learner."""


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


OURS = ("diloco_worker", "diloco_common")
PYTHONS = sysconfig.get_path("stdlib")


class Notice:
    """The handler of SIGTERM for one learner. Made in any thread, but works only if that is the main thread."""

    def __init__(self, heard: Callable[[], None], patience_s: Callable[[], float | None] = lambda: None) -> None:
        """Both are called in the signal handler, so they may only set and read something. `patience_s` returns the
        seconds to wait for the end of the step; None: forever."""
        self._heard, self._patience_s = heard, patience_s
        self._waits: SimpleQueue[float | None] = SimpleQueue()  # its `put` is safe in a signal handler
        self._is_heeded = threading.Event()
        self._is_too_long = False
        self._home = Home()
        self._has_come = False
        self.is_over = False
        before = signal.getsignal(signal.SIGTERM)
        is_free = before is signal.SIG_DFL or (isinstance(before, Notice) and before.is_over)
        if _is_main_thread() and is_free:
            signal.signal(signal.SIGTERM, self)
            threading.Thread(target=self._wait, name="diloco-notice", daemon=True).start()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal. Other handlers may call it, or install it again after its end, as Lightning does."""
        if self.is_over or not self._home.is_here:  # a forked child is not a learner: `Process.terminate` ends it
            _end_by_signal()
        if self._is_too_long and not self._is_heeded.is_set():
            self._is_heeded.set()
            raise as_exit("the step took too long and was interrupted")
        if not self._has_come:
            self._waits.put(self._patience_s())
        self._has_come = True
        self._heard()

    def heed(self) -> None:
        """The learner reacts to the signal. May be repeated."""
        self._is_heeded.set()

    def _wait(self) -> None:
        patience_s = self._waits.get()
        if patience_s is not None and not self._is_heeded.wait(patience_s):
            self._is_too_long = True
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self, *, is_heeded: bool) -> None:
        """The learner has ended. A signal that came too late for it now has its default effect. May be repeated."""
        is_late = self._has_come and not is_heeded and not self.is_over
        self.is_over = True
        self._is_heeded.set()
        self._waits.put(None)
        if signal.getsignal(signal.SIGTERM) is self and _is_main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if is_late:
            _end_by_signal()


def as_exit(what: str) -> SystemExit:
    """The error to raise after the notice was heeded. Prints `what` to stderr."""
    print(f"diloco: SIGTERM; {what}", file=sys.stderr, flush=True)
    if not _is_main_thread():  # otherwise the error would end only the thread
        _end_by_signal()
    return SystemExit(EXIT_TERMINATED)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _end_by_signal() -> None:
    if _is_main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


class Interrupted(SystemExit, KeyboardInterrupt):
    """Ctrl-C, after the learner has left."""


def as_one_line(what: str) -> BaseException:
    """The error to raise after Ctrl-C. Prints `what` to stderr, except in an interactive interpreter."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return KeyboardInterrupt()
    print(f"diloco: interrupted; {what}", file=sys.stderr, flush=True)
    return Interrupted(EXIT_INTERRUPTED)


def say_in_one_line() -> None:
    """Print our own errors in one line, until `say_as_before`. Other errors go to the previous hook."""
    if hasattr(sys.excepthook, "before"):
        return
    before = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DilocoError):
            before(kind, error, trace)
            return
        where = _where(trace)
        print(one_line(error, f"diloco ({where})" if where else "diloco"), file=sys.stderr, flush=True)

    say.before = before  # type: ignore[attr-defined]
    sys.excepthook = say


def say_as_before() -> None:
    """A learner has finished: restore the previous hook, unless another one was set since."""
    sys.excepthook = getattr(sys.excepthook, "before", sys.excepthook)


def _where(trace: TracebackType | None) -> str:
    """The last line in the stack that is neither in our code, nor Python's, nor an installed package's."""
    where = ""
    while trace is not None:
        file, module = trace.tb_frame.f_code.co_filename, str(trace.tb_frame.f_globals.get("__name__", ""))
        if not module.startswith(OURS) and not file.startswith(("<", PYTHONS)) and "site-packages" not in file:
            where = f"{Path(file).name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return where
