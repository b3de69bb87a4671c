"""Whatever happens to a shard, its core decides the same again, from what it was told (`diloco replay`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import schedules

from diloco_common.observe.history import MemoryHistory
from diloco_planner.replay import decide_again
from diloco_server.shell.host import ShardHost
from diloco_simulator import shard_process
from diloco_simulator.cluster import run_schedule
from diloco_simulator.options import Options, draw_islands, draw_options


@pytest.mark.parametrize(
    ("draw", "seeds"),
    [(draw_options, range(4)), (draw_islands, range(2)), (schedules.hostile, range(2))],
    ids=["faults", "islands", "hostile learners"],
)
def test_a_schedule_is_decided_again(
    draw: Callable[[int], Options], seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[MemoryHistory] = []

    class Recorded(ShardHost):
        def __init__(self, *args: Any, **named: Any) -> None:
            told.append(MemoryHistory(lambda: 0.0))
            super().__init__(*args, decisions=told[-1], **named)

    monkeypatch.setattr(shard_process, "ShardHost", Recorded)
    for seed in seeds:
        run_schedule(draw(seed))
    again = [decide_again("shard", json.loads(json.dumps(one.lines))) for one in told]
    assert [one.differs for one in again if one.differs] == []
    assert sum(one.rounds for one in again) > 10
