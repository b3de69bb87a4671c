"""Children of a learner's process live, in every way that scripts have them: two of each (fork_soak.py has 300)."""

from __future__ import annotations

from pathlib import Path

import forking
import pytest
from fork_soak import SHARD, soak


@pytest.mark.parametrize("ways", [[*forking.CHILD_BY_CHILD], [*forking.LOADERS]], ids=["children", "loaders"])
def test_children_of_learners_and_shards_live(ways: list[str], tmp_path: Path) -> None:
    first, again = soak(tmp_path / "run", ways, times=2)
    for counts in (first, again):
        assert {way: deaths for way, (_, deaths) in counts.items()} == dict.fromkeys([*ways, SHARD], 0)
        assert min(children for children, _ in counts.values()) >= 2
