"""Run a module as a child that ends with its parent, even when the parent is killed with SIGKILL.

`diloco up` starts `python -m diloco_common.child PARENT_PID MODULE ARGUMENTS...`. On Linux the kernel sends SIGTERM to
this process when the parent dies. For other systems, a thread checks every second whether the parent is alive, and
kills the process if it does not end within `GRACE_S`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

GRACE_S = 10.0
"""Seconds for a child to end by itself after its parent has died."""


def end_with_parent(parent_pid: int) -> None:
    """Make this process end when its parent does.

    Linux ties the signal to the *thread* that started us, so the parent must start children from a thread that runs
    until the parent ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent_pid:  # it died before we asked
        sys.exit(f"the parent process {parent_pid} has ended")
    threading.Thread(target=_follow, args=(parent_pid,), name="diloco-parent", daemon=True).start()


def _follow(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main(argv: list[str]) -> None:
    parent_pid, module, arguments = int(argv[0]), argv[1], argv[2:]
    end_with_parent(parent_pid)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
