"""What a check has found, what checks have learnt for those after them, and how they run. Imports nothing slow.

One runs after the other: each within its time, none able to harm another, and all within the whole time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from diloco_common.errors import DilocoError
from diloco_deploy.explain.catalogue import CODES

if TYPE_CHECKING:
    from diloco_common.trust.tls import TlsFiles
    from diloco_common.wire.messages import JoinAnswer


class State(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # it works, but not at its best
    FAILURE = "failure"  # it does not work, or will not for long
    SKIPPED = "skipped"  # not looked at, as a check before it failed


@dataclass(frozen=True)
class ReportLine:
    """One line of a report."""

    state: State
    code: str
    """OK, or one that `diloco explain` knows."""
    what: str
    do: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by name and unit: round_trip_s, up_bits_per_s."""


def ok(what: str, **figures: float) -> ReportLine:
    """Nothing to mend."""
    return ReportLine(State.OK, "OK", what, figures=figures)


def warning(code: str, what: str, do: str = "", /, **figures: float) -> ReportLine:
    """It works, but not at its best. Without `do`, what `diloco explain` says."""
    return ReportLine(State.WARNING, code, what, do or CODES[code].do, figures)


def failure(code: str, what: str, do: str = "", /, **figures: float) -> ReportLine:
    """It does not work. Without `do`, what `diloco explain` says."""
    return ReportLine(State.FAILURE, code, what, do or CODES[code].do, figures)


def of_error(error: DilocoError) -> ReportLine:
    """A check ended with an error of ours; its message says what to do, too."""
    code = error.code if error.code in CODES else "UNEXPECTED"
    return failure(code, str(error))


class Door(NamedTuple):
    """How a shard is called."""

    address: str
    run_id: str
    files: TlsFiles | None = None
    token: str | None = None


class MeasuredShard(NamedTuple):
    """What a shard says of itself, and the way to it."""

    up: float | None
    """Bits per second; None: too few bytes came to tell."""
    skew_s: float
    """The shard's clock less ours, when its answer came."""
    package: str


@dataclass
class Known:
    """By address. Each key is written by one thread."""

    answers: dict[str, JoinAnswer] = field(default_factory=dict)
    measured: dict[str, MeasuredShard] = field(default_factory=dict)
    round_trip_s: dict[str, float] = field(default_factory=dict)


TOTAL_S = 16.0
"""Of all checks together."""


class Check(NamedTuple):
    """One question."""

    name: str
    about: str
    """What it looks at: an address, a folder; shown beside the name."""
    seconds: float
    """It is given up after that."""
    look: Callable[[], ReportLine | Sequence[ReportLine]]
    needs: tuple[str, ...] = ()
    """Names of checks of the same `about` without which it makes no sense."""


class CheckedLine(NamedTuple):
    """A finding, and which check made it."""

    check: Check
    finding: ReportLine


def run_checks(checks: Sequence[Check], clock: Callable[[], float], ends_at: float) -> Iterator[CheckedLine]:
    """The findings of all checks, in order, as they are made. `ends_at`: a time of the clock, in seconds."""
    bad: set[tuple[str, str]] = set()
    for check in checks:
        missing = [name for name in check.needs if (name, check.about) in bad]
        if missing:
            found: Sequence[ReportLine] = [
                ReportLine(State.SKIPPED, "SKIPPED", f"not looked at, because of: {missing[0]}")
            ]
        else:
            found = _look(check, max(0.1, min(check.seconds, ends_at - clock())))
        if any(f.state in (State.FAILURE, State.SKIPPED) or f.code == "CHECK_TIMED_OUT" for f in found):
            bad.add((check.name, check.about))
        for finding in found:
            yield CheckedLine(check, finding)


def _look(check: Check, seconds: float) -> Sequence[ReportLine]:
    """On a thread of its own, which is left behind if it hangs: it must not keep the process from ending."""
    found: list[ReportLine] = []

    def look() -> None:
        try:
            answer = check.look()
            found.extend([answer] if isinstance(answer, ReportLine) else answer)
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
