"""What waits for a learner that reads slowly, or not at all."""

from __future__ import annotations

import asyncio

import pytest

from diloco_common.wire.messages import Collect, Committed, Directive, Drain, Evicted, Pulse, Stop
from diloco_server.shell.streams import LearnerStream


def heard(*said: Directive) -> list[Directive]:
    """All that a learner hears that reads once everything is said and the stream is over."""

    async def read() -> list[Directive]:
        stream = LearnerStream("a", 1)
        for directive in said:
            stream.send(directive)
        stream.end()
        found = []
        while (directive := await stream.next()) is not None:
            found.append(directive)
        return found

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ([Pulse(1, 9), Pulse(2, 9)], [Pulse(2, 9)]),
        ([Committed(0, 1, 7), Collect(0, 2, 7)], [Committed(0, 1, 7), Collect(0, 2, 7)]),
        # a round is asked for after the version that it is relative to
        (
            [Committed(0, 1, 7), Collect(0, 2, 7), Committed(0, 2, 7), Collect(0, 3, 7)],
            [Committed(0, 2, 7), Collect(0, 3, 7)],
        ),
        ([Committed(0, 5, 7), Committed(0, 3, 8)], [Committed(0, 3, 8)]),  # a new name
        ([Stop(), Drain(), Stop()], [Stop(), Drain()]),
        ([Evicted("SUPERSEDED", "1"), Evicted("LEASE_EXPIRED", "2")], [Evicted("SUPERSEDED", "1")]),
        # a fragment keeps its turn, or a slow reader would never come to the last ones
        (
            [Committed(0, 1, 7), Committed(1, 1, 7), Committed(0, 2, 7), Collect(0, 3, 7)],
            [Committed(0, 2, 7), Collect(0, 3, 7), Committed(1, 1, 7)],
        ),
    ],
)
def test_a_later_directive_takes_the_place_of_an_earlier_one(said: list[Directive], left: list[Directive]) -> None:
    assert heard(*said) == left
