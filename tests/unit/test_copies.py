"""How far a shard may be ahead of its standby."""

from __future__ import annotations

import pytest

from diloco_server.shell.streams import Copies


@pytest.mark.parametrize(
    ("on_disk", "held", "version", "may"),
    [
        ((1, 2), (), 2, True),  # nobody stands by
        ((1, 2), (1,), 2, True),  # it lacks the newest alone
        ((1, 2, 3), (1,), 3, False),  # it would lack two
        ((1, 2, 3), (1, 2), 3, True),
        ((1, 2, 3), (1, 2, 3), 3, True),
        ((1,), (1,), 4, True),  # written from time to time: those between are lost in any case
        ((1, 5), (1,), 7, False),
    ],
)
def test_a_version_is_announced_once_the_standby_holds_the_one_before(
    on_disk: tuple[int, ...], held: tuple[int, ...], version: int, may: bool
) -> None:
    copies = Copies()
    for number in on_disk:
        copies.is_on_disk(0, number)
        if number in held:
            copies.holds(0, number)
    assert copies.may_announce(0, version) is may


def test_one_that_fell_behind_is_not_waited_for_until_it_has_caught_up() -> None:
    copies = Copies()
    for number in (5, 6, 7):
        copies.is_on_disk(0, number)
    copies.holds(0, 5)
    assert not copies.may_announce(0, 7)
    copies.falls_behind(0)
    copies.holds(0, 5)
    assert copies.may_announce(0, 7)
    copies.holds(0, 7)
    copies.is_on_disk(0, 8)
    copies.is_on_disk(0, 9)
    assert not copies.may_announce(0, 9)


def test_one_that_left_is_not_waited_for() -> None:
    copies = Copies()
    copies.is_on_disk(0, 1)
    copies.holds(0, 1)
    for number in (2, 3):
        copies.is_on_disk(0, number)
    assert not copies.may_announce(0, 3)
    copies.clear()
    assert copies.may_announce(0, 3)
