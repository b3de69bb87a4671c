"""What a check has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from diloco_common.errors import DilocoError
from diloco_deploy.explain.catalogue import CODES


class State(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # it works, but not at its best
    FAILURE = "failure"  # it does not work, or will not for long
    SKIPPED = "skipped"  # not looked at, as a check before it failed


@dataclass(frozen=True)
class Finding:
    """One line of a report."""

    state: State
    code: str
    """OK, or one that `diloco explain` knows."""
    what: str
    do: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by name and unit: round_trip_s, up_bits_per_s."""


def ok(what: str, **figures: float) -> Finding:
    """Nothing to mend."""
    return Finding(State.OK, "OK", what, figures=figures)


def warning(code: str, what: str, do: str = "", /, **figures: float) -> Finding:
    """It works, but not at its best. Without `do`, what `diloco explain` says."""
    return Finding(State.WARNING, code, what, do or CODES[code].do, figures)


def failure(code: str, what: str, do: str = "", /, **figures: float) -> Finding:
    """It does not work. Without `do`, what `diloco explain` says."""
    return Finding(State.FAILURE, code, what, do or CODES[code].do, figures)


def of_error(error: DilocoError) -> Finding:
    """A check ended with an error of ours; its message says what to do, too."""
    code = error.code if error.code in CODES else "UNEXPECTED"
    return failure(code, str(error))
