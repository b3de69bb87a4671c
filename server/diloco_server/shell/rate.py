"""How often something may happen, per account: pure, time comes in as a number."""

from __future__ import annotations

from diloco_common.errors import Busy


class Rate:
    """A token bucket per account: `burst` events at once, and `per_s` of them per second in the long run."""

    def __init__(self, what: str, burst: float, per_s: float, accounts_max: int = 8192) -> None:
        """`what`: in words, for whoever is told to wait. `accounts_max`: accounts that are remembered."""
        self._what, self._burst, self._per_s, self._accounts_max = what, burst, per_s, accounts_max
        self._left: dict[str, tuple[float, float]] = {}  # account -> (events left, at this time)

    def take(self, account: str, now: float) -> None:
        """One event. Raises Busy."""
        left, since = self._left.pop(account, (self._burst, now))
        left = min(self._burst, left + self._per_s * (now - since))
        if len(self._left) >= self._accounts_max:
            self._forget(now)
        self._left[account] = (left - 1 if left >= 1 else left, now)
        if left < 1:
            raise Busy(f"too many {self._what}: at most {self._per_s:g} per second; try again in a moment")

    def _forget(self, now: float) -> None:
        """Make room: those that are full again are as good as new; else whoever was heard longest ago."""
        full = [a for a, (left, since) in self._left.items() if left + self._per_s * (now - since) >= self._burst]
        for account in full or [next(iter(self._left))]:
            del self._left[account]
