"""What a shard refuses before it can touch state, one guard at a time. test_shard.py shows that state stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diloco_common.codec import encode_payload
from diloco_common.errors import (
    TooStale,
    WrongRound,
)
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_common.wire.messages import PushHeader, VersionId
from diloco_server.core import admission
from diloco_server.core.fragment import FragmentState, Phase
from diloco_server.core.record import Record
from diloco_server.core.round import Round

MANIFEST = cut([TensorSpec("w", (100,))], 1, 1)
HEADER = PushHeader(
    fragment_id=0, round=6, epoch=3, base_version=5, tokens=40, steps=4,
    payload=encode_payload(torch.ones(100), "int8").header, manifest_digest=MANIFEST.digest,
)  # fmt: skip


def make_state() -> FragmentState:
    """Version 5, and round 6 has asked a and b, of whom b is lost."""
    record = Record(0, 3, 5, {}, {}, 0)
    return FragmentState(MANIFEST.fragments[0], record, Phase.COLLECTING, Round(6, 0.0, {"a": 1, "b": 2}, lost={"b"}))


@pytest.mark.parametrize(
    ("epoch", "base_version", "in_line"),
    [
        (7, 5, True),  # the latest version
        (3, 4, True),  # what this epoch began with
        (3, 2, True),  # before it
        (3, 5, False),  # announced in the earlier epoch, and lost: its number was given again
        (5, 4, False),  # of no epoch that this version came from
    ],
)
def test_a_base_version_is_one_that_the_latest_version_came_from(epoch: int, base_version: int, in_line: bool) -> None:
    """P4: the shard came back with version 4 of epoch 3, and has made version 5 in epoch 7."""
    state = make_state()
    state.record, state.recovered = replace(state.record, epoch=7), VersionId(3, 4)
    assert admission.is_in_line(replace(HEADER, epoch=epoch, base_version=base_version), state, 7) is in_line


@pytest.mark.parametrize(
    ("learner_id", "changes", "error", "words"),
    [
        ("a", {"steps": 0}, WrongRound, "at least 1 step and 1 token, got 0 and 40"),
        ("a", {"tokens": 0}, WrongRound, "at least 1 step and 1 token, got 4 and 0"),
        ("a", {"round": 7}, WrongRound, r"round 7 is not open \(latest version 5\)"),
        ("b", {}, WrongRound, "round 6 did not ask b"),
        ("stranger", {}, WrongRound, "round 6 did not ask stranger"),
        ("a", {"base_version": 6}, WrongRound, "base version 6 does not exist yet, latest is 5"),
        ("a", {"base_version": 2}, TooStale, r"3 versions old, at most 2 .* \(sync.staleness_max\); pull first"),
    ],
)
def test_the_round_and_what_it_is_relative_to(learner_id, changes, error, words) -> None:
    with pytest.raises(error, match=words):
        admission.check_round(replace(HEADER, **changes), make_state(), learner_id, staleness_max=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("base_version", [3, 4, 5])
def test_staleness_within_its_bound_passes(base_version: int) -> None:
    admission.check_round(replace(HEADER, base_version=base_version), make_state(), "a", staleness_max=2)
