"""Honest accounting: what is in flight, and how many took part."""

from __future__ import annotations

import pytest

from diloco_server.core.ledger import Ledger


@pytest.mark.parametrize(
    ("accepted", "merged", "fenced", "in_flight"), [(0, 0, 0, 0), (100, 0, 0, 100), (100, 60, 30, 10), (100, 70, 30, 0)]
)
def test_what_was_accepted_is_merged_fenced_or_in_flight(
    accepted: int, merged: int, fenced: int, in_flight: int
) -> None:
    ledger = Ledger(tokens_accepted=accepted, tokens_merged=merged, tokens_fenced=fenced)
    assert ledger.tokens_in_flight == in_flight


@pytest.mark.parametrize(("rounds", "participants", "mean"), [(0, 0, 0.0), (4, 10, 2.5)])
def test_participants_per_round(rounds: int, participants: int, mean: float) -> None:
    assert Ledger(rounds=rounds, participants=participants).participants_mean == mean
