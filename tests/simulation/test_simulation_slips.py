"""Small slips of the product that drawn schedules have found: each is found again, by the schedule that was kept."""

from __future__ import annotations

import pytest
import torch
from hunt import found_by
from slips import KEPT

SLOW = {"count_leases_from_the_join"}
"""Its schedule takes seconds."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore:coroutine")  # a schedule that failed leaves some that never began
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("slip", [pytest.param(s, marks=[pytest.mark.gate] * (s in SLOW)) for s in KEPT])
def test_the_schedule_that_was_kept_finds_the_slip(slip: str) -> None:
    assert found_by(slip, iter(KEPT[slip][:1])) == KEPT[slip]
