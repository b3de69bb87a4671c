"""Who has to go when all places for HTTP are taken: one of the larger crowd."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from diloco_common.observe.http_connections import CONNECTIONS_MAX, HEALTH_MAX, Connections


class _Transport:
    def __init__(self) -> None:
        self.is_open = True

    def abort(self) -> None:
        self.is_open = False


class _Guest:
    def __init__(self, among: Connections, *, asks: bool) -> None:
        self._door = _Transport()
        self.transport = cast(asyncio.Transport, self._door)
        among.make_room()
        among.is_idle(self)
        if asks:
            among.is_busy(self)

    @property
    def is_in(self) -> bool:
        return self._door.is_open


@pytest.mark.parametrize(("crowd_asks", "caller_asks"), [(False, True), (True, False)])
def test_a_crowd_of_one_kind_pushes_out_nobody_of_the_other(crowd_asks: bool, caller_asks: bool) -> None:
    among = Connections()
    for _ in range(1000):
        _Guest(among, asks=crowd_asks)
    caller = _Guest(among, asks=caller_asks)
    for _ in range(HEALTH_MAX - 1):
        _Guest(among, asks=crowd_asks)
    assert caller.is_in
    assert len(among) == CONNECTIONS_MAX + HEALTH_MAX


@pytest.mark.parametrize("asks", [False, True])
def test_the_oldest_of_a_crowd_has_to_go(asks: bool) -> None:
    among = Connections()
    crowd = [_Guest(among, asks=asks) for _ in range(CONNECTIONS_MAX + HEALTH_MAX + 3)]
    assert [one.is_in for one in crowd] == [False] * 3 + [True] * (CONNECTIONS_MAX + HEALTH_MAX)
