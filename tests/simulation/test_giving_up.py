"""When the simulator takes a learner's giving up for a violation."""

from __future__ import annotations

import pytest

from diloco_simulator.verify.invariants import Violation, superseded_only_by_another
from diloco_worker.core.agreement import REFUSALS_MAX


def test_a_learner_may_give_up_where_its_contributions_were_made_to_hold_nan_often_enough() -> None:
    superseded_only_by_another("a", "NOT_FINITE", 1, REFUSALS_MAX)
    with pytest.raises(Violation, match="gave up: NOT_FINITE"):
        superseded_only_by_another("a", "NOT_FINITE", 2, REFUSALS_MAX - 1)


def test_nothing_else_becomes_legal_by_that() -> None:
    superseded_only_by_another("a", "SUPERSEDED", 2, 0)
    with pytest.raises(Violation, match="gave up: SUPERSEDED"):
        superseded_only_by_another("a", "SUPERSEDED", 1, REFUSALS_MAX)
