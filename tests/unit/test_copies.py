"""How far a shard may be ahead of its standby."""

from __future__ import annotations

from diloco_server.shell.streams import Copies


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
