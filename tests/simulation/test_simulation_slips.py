"""Small slips of the product that drawn schedules have found: each is found again, by the schedule that was kept."""

from __future__ import annotations

import pytest
from mutants import broken_by
from slips import KEPT, SLIPS

from diloco_simulator.options import draw

SLOW = {"count_leases_from_the_join"}
"""Its schedule takes seconds."""


@pytest.mark.filterwarnings("ignore:coroutine")  # a schedule that failed leaves some that never began
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("slip", [pytest.param(s, marks=[pytest.mark.gate] * (s in SLOW)) for s in KEPT])
def test_the_schedule_that_was_kept_finds_the_slip(slip: str) -> None:
    schedule, broken = KEPT[slip]
    assert broken_by(SLIPS[slip], draw(schedule)) == broken
