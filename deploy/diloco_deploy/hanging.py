"""Which processes hang: they live, but answer nothing, or say themselves that nothing goes on. Pure: times come in.

Only time in which we looked counts: if this process was stopped itself, or the machine slept, nobody is to blame.
"""

from __future__ import annotations

from collections.abc import Iterable

LOOKS_WITHIN_S = 5.0
"""If we did not look for longer than this, the time does not count."""


class Hanging:
    """Who was heard when."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: seconds of silence after which a process hangs; 0: never."""
        self._limit_s = limit_s
        self._heard_at: dict[str, float] = {}
        self._hung: set[str] = set()
        self._looked_at: float | None = None

    def heard(self, name: str, now: float, *, is_hung: bool) -> None:
        """A process has answered. `is_hung`: its training thread makes no progress, as it says itself."""
        self._heard_at[name] = now
        if is_hung:
            self._hung.add(name)

    def look(self, names: Iterable[str], now: float) -> dict[str, str]:
        """Those of `names` (whose ports are bound) that hang, and why. Each is told once per process."""
        if self._looked_at is not None and (gap := now - self._looked_at) > LOOKS_WITHIN_S:
            self._heard_at = {name: at + gap for name, at in self._heard_at.items()}
        self._looked_at = now
        self._heard_at = {name: self._heard_at.get(name, now) for name in names}
        found = {}
        for name, at in self._heard_at.items():
            if name in self._hung:
                found[name] = "its training thread makes no progress (worker.hung_s)"
            elif self._limit_s and now - at > self._limit_s:
                found[name] = f"it has answered nothing for {now - at:.0f} s (cluster.hung_s)"
        for name in found:
            del self._heard_at[name]
        self._hung.clear()
        return found if self._limit_s else {}
