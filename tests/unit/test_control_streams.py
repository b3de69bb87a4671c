"""What waits for a learner that reads slowly, or not at all."""

from __future__ import annotations

import asyncio

import pytest

from diloco_common.wire.messages import Collect, Committed, Directive, Drain, Evicted, Pulse, Stop
from diloco_server.shell.control_streams import ControlStream


def heard(*said: Directive) -> list[Directive]:
    """All that a learner hears that reads once everything is said and the stream is over."""

    async def read() -> list[Directive]:
        stream = ControlStream("a", 1)
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
        ([Committed(0, 1, 7), Committed(1, 1, 7)], [Committed(0, 1, 7), Committed(1, 1, 7)]),
        ([Committed(0, 1, 7), Collect(0, 2, 7)], [Committed(0, 1, 7), Collect(0, 2, 7)]),
        # a round is asked for after the version that it is relative to
        (
            [Committed(0, 1, 7), Collect(0, 2, 7), Committed(0, 2, 7), Collect(0, 3, 7)],
            [Committed(0, 2, 7), Collect(0, 3, 7)],
        ),
        ([Committed(0, 5, 7), Committed(0, 3, 8)], [Committed(0, 3, 8)]),  # a new name
        ([Pulse(1, 9), Committed(0, 1, 7), Pulse(2, 9)], [Pulse(2, 9), Committed(0, 1, 7)]),
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


def test_a_stream_begins_with_any_number_of_fragments() -> None:
    """All that a learner could have missed is told before it reads anything."""
    said = [tell for p in range(4096) for tell in (Committed(p, 1, 7), Collect(p, 2, 7))]
    assert heard(*said) == said


def test_a_learner_that_reads_nothing_makes_no_more_wait_than_there_are_fragments() -> None:
    said = [tell for v in range(50) for p in range(3) for tell in (Pulse(v, 9), Committed(p, v, 7), Collect(p, v, 7))]
    assert len(heard(*said)) == 7


def test_a_reader_that_waits_hears_the_next_one_and_the_end() -> None:
    async def read() -> list[Directive | None]:
        stream = ControlStream("a", 1)
        first = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.send(Stop())
        found = [await first]
        last = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.end()
        return [*found, await last]

    assert asyncio.run(read()) == [Stop(), None]
