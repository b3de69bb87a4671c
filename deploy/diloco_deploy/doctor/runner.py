"""Runs checks one after the other: each within its time, none able to harm another, and all within the whole time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from diloco_common.errors import DilocoError
from diloco_deploy.doctor.finding import Finding, State, failure, of_error, warning

TOTAL_S = 16.0
"""Of all checks together."""


class Check(NamedTuple):
    """One question."""

    name: str
    about: str
    """What it looks at: an address, a folder; shown beside the name."""
    seconds: float
    """It is given up after that."""
    look: Callable[[], Finding | Sequence[Finding]]
    needs: tuple[str, ...] = ()
    """Names of checks of the same `about` without which it makes no sense."""


class Found(NamedTuple):
    """A finding, and which check made it."""

    check: Check
    finding: Finding


def run(checks: Sequence[Check], clock: Callable[[], float], ends_at: float) -> Iterator[Found]:
    """The findings of all checks, in order, as they are made. `ends_at`: a time of the clock, in seconds."""
    bad: set[tuple[str, str]] = set()
    for check in checks:
        missing = [name for name in check.needs if (name, check.about) in bad]
        if missing:
            found: Sequence[Finding] = [Finding(State.SKIPPED, "SKIPPED", f"not looked at, because of: {missing[0]}")]
        else:
            found = _look(check, max(0.1, min(check.seconds, ends_at - clock())))
        if any(f.state in (State.FAILURE, State.SKIPPED) or f.code == "CHECK_TIMED_OUT" for f in found):
            bad.add((check.name, check.about))
        for finding in found:
            yield Found(check, finding)


def _look(check: Check, seconds: float) -> Sequence[Finding]:
    """On a thread of its own, which is left behind if it hangs: it must not keep the process from ending."""
    found: list[Finding] = []

    def look() -> None:
        try:
            answer = check.look()
            found.extend([answer] if isinstance(answer, Finding) else answer)
        except DilocoError as error:
            found.append(of_error(error))
        except Exception as error:  # a check that breaks is one finding, and the others go on
            found.append(failure("CHECK_FAILED", f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=look, name=f"check {check.name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return [warning("CHECK_TIMED_OUT", f"no answer within {seconds:.1f} s")]
    return found
