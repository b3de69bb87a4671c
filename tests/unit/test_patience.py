"""A wait is said within two seconds, then every ten, and its end only to those who heard that it began."""

from __future__ import annotations

from typing import Any

from diloco_common.wire.calls import LONGEST_S, SAY_EVERY_S
from diloco_worker.shell.ending import WaitLog


class Said:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def event(self, what: str, **fields: object) -> None:
        self.lines.append((what, fields))


def test_a_wait_is_said_soon_and_then_now_and_then() -> None:
    said: Any = Said()
    patience = WaitLog(said, "waiting", began=100.0)
    for tenth in range(int(10 * (LONGEST_S + SAY_EVERY_S)) + 2):
        patience.still("no answer from ps:1", 100.0 + tenth / 10)
    patience.over(120.0)
    assert said.lines == [
        ("waiting", {"for_s": 2, "why": "no answer from ps:1"}),
        ("waiting", {"for_s": 12, "why": "no answer from ps:1"}),
        ("waiting: done", {"for_s": 20}),
    ]
