"""The identity of a caller. It is the same for every transport, and known before the first payload byte."""

from __future__ import annotations

import re
from dataclasses import dataclass

from diloco_common.errors import BadLearnerId


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller and its lease."""

    run_id: str
    learner_id: str = ""
    """Empty: an observer."""
    generation: int = 0
    """0: no lease (a call of Join, or an observer)."""
    epoch: int = 0
    """The epoch in which the shard gave the lease."""


_LEARNER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


def check_learner_id(learner_id: str) -> None:
    """Raises BadLearnerId."""
    if not _LEARNER_ID.match(learner_id):
        raise BadLearnerId(f"learner id {learner_id[:64]!r} is not 1 to 64 of A-Z a-z 0-9 . _ -")
