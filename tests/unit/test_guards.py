"""What a shard refuses before it can touch state, one guard at a time. test_shard.py shows that state stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco_common.codec import encode_payload
from diloco_common.errors import (
    BadPayload,
    ManifestMismatch,
    Refusal,
    TooStale,
    UnknownEncoding,
    WrongEpoch,
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
    ("changes", "error", "words"),
    [
        ({"manifest_digest": "f" * 32}, ManifestMismatch, "'ffffffffffff' is not this run's .*; join again"),
        ({"epoch": 2}, WrongEpoch, "epoch 2 is over, version 5 of epoch 3 did not come from it; pull first"),
        ({"epoch": 4}, WrongEpoch, "version 5 of epoch 4 is over"),
    ],
)
def test_another_model_or_another_epoch_of_the_shard(changes: dict[str, Any], error: type, words: str) -> None:
    header = replace(HEADER, **changes)
    with pytest.raises(error, match=words):  # noqa: PT012 - one of them refuses
        admission.check_origin(header, MANIFEST)
        admission.check_epoch(header, make_state(), 3)


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


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"encoding": "int4"}, UnknownEncoding),
        ({"num_elements": 101}, BadPayload),
        ({"num_bytes": 10**12}, BadPayload),
        ({"chunk_elements": 2**40}, BadPayload),
    ],
)
def test_announced_sizes_that_do_not_fit(changes: dict[str, object], error: type[Refusal]) -> None:
    header = replace(HEADER, payload=replace(HEADER.payload, **changes))  # type: ignore[arg-type]
    with pytest.raises(error):
        admission.check_sizes(header, make_state(), ("int8",))
