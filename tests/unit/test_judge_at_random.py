"""The judge on histories drawn from seeds: silent where all went well, and not where a promise was broken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_histories import Flaw, Run

from diloco_simulator.verify.judge import violations


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_good_history_is_silent(seed: int):
    run = Run(seed)
    assert violations(run.go(400), excused=run.excused) == []


@pytest.mark.parametrize("flaw", Flaw)
def test_a_flaw_is_found(flaw: Flaw):
    """In every history in which it had its way often enough to show."""
    shown = 0
    for seed in range(25):
        run = Run(seed, flaw)
        found = {violation.check for violation in violations(run.go(2000), excused=run.excused)}
        if run.happened >= 3:
            shown += 1
            assert flaw.value in found, f"seed {seed}"
    assert shown > 10


def test_the_histories_lose_and_rename_versions():
    """Or the tests above would show little."""
    lost = renamed = resumed = merged = 0
    for seed in range(30):
        found = Run(seed).go(400)
        lost += sum(not version.survives for version in found.lineage.versions)
        lines = [line for process in found.shard_processes() for line in process.of("restored")]
        renamed += sum(line["epoch"] != line["stored_epoch"] for line in lines)
        resumed += sum(process.number > 0 for process in found.learner_processes())
        merged += len(found.merges())
    assert min(lost, renamed, resumed, merged) > 30
