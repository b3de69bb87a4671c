"""The shell lets the core decide once for many events: a decision for each would cost the square of the learners."""

from __future__ import annotations

import asyncio

from diloco_common.metrics import ShardMetrics
from diloco_common.settings import Settings
from diloco_server.host import ShardHost
from diloco_server.storage.store import MemoryStore


class CountingClock:
    """The core is given the time once per decision, and nobody else asks here."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return 0.0


def test_events_that_come_together_are_decided_on_once_and_soon() -> None:
    async def decisions() -> list[int]:
        clock = CountingClock()
        host = ShardHost(Settings(), MemoryStore(), ShardMetrics(), clock)
        counts, begun = [], clock.asked
        for _ in range(2):
            for _ in range(1000):
                host.advance_soon()
            counts.append(clock.asked - begun)
            async with asyncio.timeout(10.0):
                while clock.asked - begun == counts[-1]:  # noqa: ASYNC110 - the host tells nobody
                    await asyncio.sleep(0)
            counts.append(clock.asked - begun)
        host.close()
        return counts

    assert asyncio.run(decisions()) == [0, 1, 1, 2]


def test_no_decision_follows_the_end() -> None:
    async def decisions_after_the_end() -> int:
        clock = CountingClock()
        host = ShardHost(Settings(), MemoryStore(), ShardMetrics(), clock)
        host.advance()
        host.advance_soon()
        host.close()
        asked = clock.asked
        for _ in range(100):
            await asyncio.sleep(0)
        return clock.asked - asked

    assert asyncio.run(decisions_after_the_end()) == 0
