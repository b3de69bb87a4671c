"""`diloco doctor`: checks a learner's connection to the shards, or a shard's machine, and names the problems.

This module defines checks and their results, and runs them: one after another, each with its own time limit and all
within a total. No check can harm another. Imports nothing slow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from diloco_common.errors import DilocoError
from diloco_deploy.codes import CODES

if TYPE_CHECKING:
    from diloco_common.trust.files import TlsFiles
    from diloco_common.wire.messages import JoinAnswer


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, but not at its best
    FAILURE = "failure"  # does not work, or soon will not
    SKIPPED = "skipped"  # not checked, because an earlier check failed


@dataclass(frozen=True)
class ReportLine:
    state: State
    code: str
    """OK, or a code of `diloco explain`."""
    what: str
    do: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measured values, by name with unit: round_trip_s, free_bytes."""


def ok(what: str, **figures: float) -> ReportLine:
    return ReportLine(State.OK, "OK", what, figures=figures)


def warning(code: str, what: str, do: str = "", /, **figures: float) -> ReportLine:
    """It works, but not at its best. `do` defaults to the text of `diloco explain`."""
    return ReportLine(State.WARNING, code, what, do or CODES[code].do, figures)


def failure(code: str, what: str, do: str = "", /, **figures: float) -> ReportLine:
    """It does not work. `do` defaults to the text of `diloco explain`."""
    return ReportLine(State.FAILURE, code, what, do or CODES[code].do, figures)


def of_error(error: DilocoError) -> ReportLine:
    """The finding for a check that raised one of our errors, whose message says what to do."""
    code = error.code if error.code in CODES else "UNEXPECTED"
    return failure(code, str(error))


class Door(NamedTuple):
    address: str
    run_id: str
    files: TlsFiles | None = None
    token: str | None = None


class ToldOfItself(NamedTuple):
    skew_s: float
    """The shard's clock minus ours, when its answer arrived."""
    package: str


@dataclass
class Known:
    """Results by address, for later checks. Each key is written by one thread."""

    answers: dict[str, JoinAnswer | None] = field(default_factory=dict)
    """None: the shard waits for its first learner."""
    told: dict[str, ToldOfItself] = field(default_factory=dict)
    round_trip_s: dict[str, float] = field(default_factory=dict)


TIMES = 3
"""How often a measurement is repeated."""
SLOW_S = 0.5
"""A round trip, or a write of a few megabytes, that takes longer is worth a warning."""
TOTAL_S = 16.0
"""Time limit of all checks together."""


class Check(NamedTuple):
    name: str
    about: str
    """What it checks, such as an address or a folder; shown beside the name."""
    seconds: float
    look: Callable[[], ReportLine | Sequence[ReportLine]]
    needs: tuple[str, ...] = ()
    """Checks of the same `about` that must have passed."""


class CheckedLine(NamedTuple):
    check: Check
    finding: ReportLine


def run_checks(checks: Sequence[Check], clock: Callable[[], float], ends_at: float) -> Iterator[CheckedLine]:
    """Run the checks in order, and yield findings as they are made. `ends_at`: a time of the clock, in seconds."""
    bad: set[tuple[str, str]] = set()
    for check in checks:
        missing = [name for name in check.needs if (name, check.about) in bad]
        if missing:
            found: Sequence[ReportLine] = [
                ReportLine(State.SKIPPED, "SKIPPED", f"not checked, because of: {missing[0]}")
            ]
        else:
            found = _look(check, max(0.1, min(check.seconds, ends_at - clock())))
        if any(f.state in (State.FAILURE, State.SKIPPED) or f.code == "CHECK_TIMED_OUT" for f in found):
            bad.add((check.name, check.about))
        for finding in found:
            yield CheckedLine(check, finding)


def _look(check: Check, seconds: float) -> Sequence[ReportLine]:
    """Run a check on its own thread. If it hangs, the daemon thread is left behind."""
    found: list[ReportLine] = []

    def look() -> None:
        try:
            answer = check.look()
            found.extend([answer] if isinstance(answer, ReportLine) else answer)
        except DilocoError as error:
            found.append(of_error(error))
        except Exception as error:  # a failing check is a finding; the others go on
            found.append(failure("CHECK_FAILED", f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=look, name=f"check {check.name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return [warning("CHECK_TIMED_OUT", f"no answer within {seconds:.1f} s")]
    return found
