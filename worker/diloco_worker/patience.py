"""How a person hears what is waited for: soon, and then now and then."""

from __future__ import annotations

from diloco_common.observe.logs import Log
from diloco_worker.core.dialing import ANNOUNCE_WAIT_S

FIRST_S = 1.5
"""What takes longer than this is said."""


class Patience:
    """One wait. Times are seconds of any clock."""

    def __init__(self, log: Log, what: str, began: float) -> None:
        self._log = log
        self._what = what
        self._began = began
        self._say_at = began + FIRST_S
        self._has_said = False

    def still(self, why: str, now: float) -> None:
        """It is not over, and this is what is missing."""
        if now >= self._say_at:
            self._log.event(self._what, for_s=round(now - self._began), why=why)
            self._say_at = now + ANNOUNCE_WAIT_S
            self._has_said = True

    def over(self, now: float) -> None:
        """Say so, if anybody heard that it was waited for."""
        if self._has_said:
            self._log.event(f"{self._what}: done", for_s=round(now - self._began))
