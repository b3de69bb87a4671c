"""Ctrl-C in one line.

A `KeyboardInterrupt` that nobody catches prints the whole stack, which says nothing to whoever pressed the keys. What
is raised instead is caught by `except KeyboardInterrupt` all the same. If nobody does, the process ends with exit
code 130.
"""

from __future__ import annotations

import sys

from diloco_common.errors import EXIT_INTERRUPTED


class Interrupted(SystemExit, KeyboardInterrupt):
    """Ctrl-C, once all is in order."""


def as_one_line(what: str) -> BaseException:
    """The error to raise after Ctrl-C. Says `what` on stderr, unless somebody types into this very process."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return KeyboardInterrupt()
    print(f"diloco: interrupted; {what}", file=sys.stderr, flush=True)
    return Interrupted(EXIT_INTERRUPTED)
