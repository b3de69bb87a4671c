"""What waits for a learner that reads slowly, or not at all; how far a shard may be ahead of its standby."""

from __future__ import annotations

import asyncio

import pytest

from diloco_common.wire.messages import Collect, Committed, Directive, Drain, Evicted, Pulse, Stop
from diloco_server.shell.streams import Copies, LearnerStream


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


def test_a_version_is_announced_once_the_standby_holds_the_one_before() -> None:
    copies = Copies()
    assert copies.may_announce(0, 2), "nobody stands by"
    copies.holds(0, 1, announced=1)
    assert copies.may_announce(0, 2), "it lacks the newest alone"
    assert not copies.may_announce(0, 3), "it would lack two"
    assert copies.may_announce(1, 3), "another fragment"
    copies.holds(0, 2, announced=2)
    assert copies.may_announce(0, 3)
    copies.clear()
    assert copies.may_announce(0, 9), "it has left"


def test_one_that_fell_behind_is_not_waited_for_until_it_has_caught_up() -> None:
    copies = Copies()
    copies.holds(0, 5, announced=5)
    assert not copies.may_announce(0, 7)
    copies.falls_behind(0)
    copies.holds(0, 5, announced=7)
    assert copies.may_announce(0, 9)
    copies.holds(0, 6, announced=7)
    assert copies.may_announce(0, 7)
    assert not copies.may_announce(0, 9)
    copies.holds(0, 5, announced=7)
    assert copies.may_announce(0, 7), "a confirmation that is late changes nothing"
