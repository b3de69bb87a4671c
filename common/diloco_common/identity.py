"""Who calls: the same for every transport, and told before the first payload byte."""

from __future__ import annotations

import re
from dataclasses import dataclass

from diloco_common.errors import BadLearnerId


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller, and the lease that it holds."""

    run_id: str
    learner_id: str = ""
    """Empty: an observer."""
    generation: int = 0
    """0: no lease (Join, and observers)."""
    epoch: int = 0
    """That the lease was given in."""


_LEARNER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


def check_learner_id(learner_id: str) -> None:
    """Raises BadLearnerId."""
    if not _LEARNER_ID.match(learner_id):
        raise BadLearnerId(f"learner id {learner_id[:64]!r} is not 1 to 64 of A-Z a-z 0-9 . _ -")
