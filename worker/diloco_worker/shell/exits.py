"""How the process of a learner ends from outside the loop: by SIGTERM, by Ctrl-C, or by an error that nobody catches.

SIGTERM: the machine is about to be taken away, or somebody ends this process. Where nobody else handles the signal, a
learner does: at its next step boundary it hands over what it has trained (`Learner.leave`), and then ends the process
by `SystemExit(143)`, so that `with` and `finally` do their part. A step that is too long to wait for is broken off, by
the same error: `with learner:` then hands over what the steps before it have trained.

Ctrl-C: a `KeyboardInterrupt` that nobody catches prints the whole stack, which says nothing to whoever pressed the
keys. What is raised instead is caught by `except KeyboardInterrupt` all the same. If nobody does, the process ends with
exit code 130.

An error of ours that a training script does not catch: its words and its code, on stderr. The stack says where in the
script it was; the line is named. All other errors keep their tracebacks.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import FrameType, TracebackType

from diloco_common.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, DilocoError, one_line
from diloco_worker.shell.home import Home

OURS = ("diloco_worker", "diloco_common")
PYTHONS = sysconfig.get_path("stdlib")


class Notice:
    """The signal, for one learner. Made in any thread; it listens if that is the main thread."""

    def __init__(self, heard: Callable[[], None], patience_s: Callable[[], float | None] = lambda: None) -> None:
        """Both are called in the signal handler, so they may only set and read something. `patience_s`: for how many
        seconds to wait for the end of the step; None: for ever."""
        self._heard, self._patience_s = heard, patience_s
        self._waits: SimpleQueue[float | None] = SimpleQueue()  # its `put` may be called in a signal handler
        self._is_heeded = threading.Event()
        self._is_too_long = False
        self._home = Home()
        self._has_come = False
        self.is_over = False
        """Whether its learner is gone."""
        before = signal.getsignal(signal.SIGTERM)
        is_free = before is signal.SIG_DFL or (isinstance(before, Notice) and before.is_over)
        if _is_main_thread() and is_free:
            signal.signal(signal.SIGTERM, self)
            threading.Thread(target=self._wait, name="diloco-notice", daemon=True).start()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler. Others may call it from theirs, and may install it again when it is over, as Lightning does."""
        if self.is_over or not self._home.is_here:  # a forked child is no learner: `Process.terminate` ends it
            _end_by_signal()
        if self._is_too_long and not self._is_heeded.is_set():
            self._is_heeded.set()
            raise as_exit("the step took too long and was interrupted")
        if not self._has_come:
            self._waits.put(self._patience_s())
        self._has_come = True
        self._heard()

    def heed(self) -> None:
        """The learner does what is to be done. Repeating it is fine."""
        self._is_heeded.set()

    def _wait(self) -> None:
        """In a thread of its own."""
        patience_s = self._waits.get()
        if patience_s is not None and not self._is_heeded.wait(patience_s):
            self._is_too_long = True
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self, *, is_heeded: bool) -> None:
        """The learner is gone. A signal that came too late for it does now what it does to any process. Repeating it is
        fine."""
        is_late = self._has_come and not is_heeded and not self.is_over
        self.is_over = True
        self._is_heeded.set()
        self._waits.put(None)
        if signal.getsignal(signal.SIGTERM) is self and _is_main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if is_late:
            _end_by_signal()


def as_exit(what: str) -> SystemExit:
    """The error to raise once the notice was heeded. Says `what` on stderr."""
    print(f"diloco: SIGTERM; {what}", file=sys.stderr, flush=True)
    if not _is_main_thread():  # there, the error would end the thread alone
        _end_by_signal()
    return SystemExit(EXIT_TERMINATED)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _end_by_signal() -> None:
    if _is_main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


class Interrupted(SystemExit, KeyboardInterrupt):
    """Ctrl-C, once all is in order."""


def as_one_line(what: str) -> BaseException:
    """The error to raise after Ctrl-C. Says `what` on stderr, unless somebody types into this very process."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return KeyboardInterrupt()
    print(f"diloco: interrupted; {what}", file=sys.stderr, flush=True)
    return Interrupted(EXIT_INTERRUPTED)


def say_in_one_line() -> None:
    """Until `say_as_before`. Whatever was to be done with other errors, is."""
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
    """A learner has finished. Who has put another hook over ours, keeps it."""
    sys.excepthook = getattr(sys.excepthook, "before", sys.excepthook)


def _where(trace: TracebackType | None) -> str:
    """The last line on the way to the error that is neither ours, nor Python's, nor an installed package's."""
    where = ""
    while trace is not None:
        file, module = trace.tb_frame.f_code.co_filename, str(trace.tb_frame.f_globals.get("__name__", ""))
        if not module.startswith(OURS) and not file.startswith(("<", PYTHONS)) and "site-packages" not in file:
            where = f"{Path(file).name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return where
