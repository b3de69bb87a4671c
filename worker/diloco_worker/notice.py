"""SIGTERM: the machine is about to be taken away, or somebody ends this process.

Where nobody else handles the signal, a learner does: at its next step boundary it hands over what it has trained
(`Learner.leave`), and then ends the process by `SystemExit(143)`, so that `with` and `finally` do their part.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from diloco_common.errors import EXIT_TERMINATED
from diloco_worker.children import Home


class Notice:
    """The signal, for one learner. Made in any thread; it listens if that is the main thread."""

    def __init__(self, heard: Callable[[], None]) -> None:
        """`heard`: called in the signal handler, so it may only set something."""
        self._heard = heard
        self._home = Home()
        self._has_come = False
        self.is_over = False
        """Whether its learner is gone."""
        before = signal.getsignal(signal.SIGTERM)
        is_free = before is signal.SIG_DFL or (isinstance(before, Notice) and before.is_over)
        if _is_main_thread() and is_free:
            signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler. Others may call it from theirs, and may install it again when it is over, as Lightning does."""
        if self.is_over or not self._home.is_here:  # a forked child is no learner: `Process.terminate` ends it
            _end_by_signal()
        self._has_come = True
        self._heard()

    def end(self, *, is_heeded: bool) -> None:
        """The learner is gone. A signal that came too late for it does now what it does to any process. Repeating it is
        fine."""
        is_late = self._has_come and not is_heeded and not self.is_over
        self.is_over = True
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
