"""A shard that is killed at random moments while learners train: `kill_shard.py`, fewer times."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_shard import kill_shard

SEED = 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [5, pytest.param(25, marks=pytest.mark.gate)])
def test_nothing_is_lost_or_counted_twice_however_often_a_shard_is_killed(kills: int, tmp_path: Path) -> None:
    """Fault 5: SIGKILL under load; versions bit-equal to what was announced, and nobody stops stepping."""
    outcome = kill_shard(tmp_path, kills, SEED)

    print(outcome)
    assert outcome.violations == []
    assert outcome.kills == kills
    assert outcome.compared > kills, "files were compared with what learners hold"
    assert outcome.announced > outcome.kills
    assert outcome.tokens_merged > 0
