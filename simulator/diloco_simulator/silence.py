"""What a simulated process gets in place of metrics and a log: it takes every call and says nothing.

Errors that the product only logs are told, so that a schedule fails on those that nobody made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Silence:
    """Metrics that count nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Whatever it is, it is not said."""


class QuietLog:
    """A log that keeps nothing but hears errors."""

    def __init__(self, name: str, on_error: Callable[[str, dict[str, Any]], None]) -> None:
        self.name = name
        self._on_error = on_error

    def event(self, what: str, **facts: Any) -> None:
        """Not said."""

    def debug(self, what: str, **facts: Any) -> None:
        """Not said."""

    def warning(self, what: str, **facts: Any) -> None:
        """Not said."""

    def error(self, what: str, **facts: Any) -> None:
        self._on_error(what, facts)
