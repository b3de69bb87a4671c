"""A standby that is promoted while learners train: `promote_standby.py`, fewer times."""

from __future__ import annotations

from pathlib import Path

import pytest
from promote_standby import promote_standby

SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.gate) for seed in range(2, 11))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("still_lives", [False, True], ids=["its machine is gone", "it lives behind a partition"])
def test_learners_go_on_with_a_promoted_standby_and_never_back(still_lives: bool, seed: int, tmp_path: Path) -> None:
    outcome = promote_standby(tmp_path, seed, still_lives=still_lives)

    print(outcome)
    assert outcome.violations == []
    assert any("promoted, with versions" in line for line in outcome.told)
    if still_lives:
        assert any("tokens that it has merged since are lost" in line for line in outcome.told)
