"""The steps of `make gpu`, the most valuable first, and how long each may take. Imports nothing slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Step(NamedTuple):
    """One process, killed when its time is over."""

    module: str
    """A module of this folder. Its `CASES` are run one after the other."""
    seconds_of_1: float
    """Its time limit in a run of one minute, which is the rehearsal on a CPU."""
    seconds_of_8: float
    case_s: float = 600.0
    """A case that takes longer counts as hung: its stacks go to the log, and the next one begins."""
    seed: int = 0
    environment: Mapping[str, str] = {}
    needs_card: bool = False


STEPS: dict[str, Step] = {
    "correct": Step("correct", 24.0, 60.0, case_s=30.0),
    # An error that changes with the seed, or vanishes when kernels do not overlap with the host, is a race.
    "correct-seed": Step("correct", 1.0, 20.0, case_s=15.0, seed=1, needs_card=True),
    "correct-blocking": Step(
        "correct", 1.0, 20.0, case_s=15.0, environment={"CUDA_LAUNCH_BLOCKING": "1"}, needs_card=True
    ),
    "cost": Step("cost", 12.0, 180.0),
    "encode": Step("encode", 6.0, 60.0),
    "doctor": Step("health", 6.0, 65.0),
    "quality": Step("quality", 9.0, 70.0),
}


def bounds(minutes: float) -> dict[str, float]:
    """Seconds of each step, interpolated linearly from the limits for 1 and 8 minutes. The sum is below the minutes."""
    share = (minutes - 1) / 7
    return {name: step.seconds_of_1 + share * (step.seconds_of_8 - step.seconds_of_1) for name, step in STEPS.items()}
