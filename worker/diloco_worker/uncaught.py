"""What becomes of an error of ours that a training script does not catch: its words and its code, on stderr.

The stack says where in the script it was; the line is named. All other errors keep their tracebacks.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import TracebackType

from diloco_common.command import one_line
from diloco_common.errors import DilocoError

OURS = ("diloco_worker", "diloco_common")
PYTHONS = sysconfig.get_path("stdlib")


def say_in_one_line() -> None:
    """From now on. Whatever was to be done with other errors, is."""
    if getattr(sys.excepthook, "says_in_one_line", False):
        return
    before = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DilocoError):
            before(kind, error, trace)
            return
        where = _where(trace)
        print(one_line(error, f"diloco ({where})" if where else "diloco"), file=sys.stderr, flush=True)

    say.says_in_one_line = True  # type: ignore[attr-defined]
    sys.excepthook = say


def _where(trace: TracebackType | None) -> str:
    """The last line on the way to the error that is neither ours, nor Python's, nor an installed package's."""
    where = ""
    while trace is not None:
        file, module = trace.tb_frame.f_code.co_filename, str(trace.tb_frame.f_globals.get("__name__", ""))
        if not module.startswith(OURS) and not file.startswith(("<", PYTHONS)) and "site-packages" not in file:
            where = f"{Path(file).name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return where
