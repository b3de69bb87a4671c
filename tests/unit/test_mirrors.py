"""What a learner takes from a mirror is what its shard has announced; everything else costs time alone."""

from __future__ import annotations

import asyncio

import pytest

import lying_mirror
from diloco_worker.shell import puller as module


def test_whatever_a_mirror_answers_only_what_was_announced_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", module.SILENT_S)  # put back: each answer has its own
    monkeypatch.setattr(module, "AGAIN_S", 0.001)
    found = asyncio.run(lying_mirror.run(400, seed=3))
    kinds = {what.partition(":")[0] for what in found}
    assert len(kinds) == 15, "every kind was drawn"
    assert found["truth: taken"] > 0 == found["truth: from the shard"]
    assert found["truth_as_values: taken"] > 0 == found["truth_as_values: from the shard"]
    taken = {what.partition(":")[0] for what in found if what.endswith(": taken")}
    assert taken <= {"truth", "truth_as_values", "other_meaning"}, "which may happen to be the right one"
