"""Versions sent as changes: every learner holds the same anchor, bit for bit, and nothing is lost for good."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import pytest
import torch
from torch import Tensor

from builders import TinyText, decoded, inner_step, make_batch, make_settings, random_values
from diloco_common.codec import Payload, encode_payload
from diloco_common.codec.change import VALUES, decode_version, encode_change, pull_encodings
from diloco_common.errors import BadPayload, NotFinite
from diloco_server.core import arithmetic
from lockstep import Lockstep

CHANGES = ("int8", "int4")
SIZE = 2**20 + 2**18 + 7
"""Two chunks, several slices, a block that is not full."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def received(payload: Payload, base: Tensor | None) -> Tensor:
    """What a learner makes of a payload."""
    anchor, _ = decode_version(payload, None if base is None else base.bfloat16())
    return anchor.float()


@pytest.mark.parametrize("encoding", CHANGES)
def test_learners_that_pull_by_different_routes_hold_the_same_anchor(encoding: str) -> None:
    """One pulls every version; one misses some and then gets the values; one comes anew each time."""
    theta = random_values(SIZE, seed=0)
    published = arithmetic.publish(arithmetic.Values(theta, []), encoding)
    steady = lagging = received(published.values, None)
    lag = 0
    for version in range(1, 13):
        theta += 0.01 / version * random_values(SIZE, seed=version)
        before = theta.clone()
        published = arithmetic.publish(arithmetic.Values(theta, []), encoding, published)
        assert published.change is not None
        assert published.change.header.encoding == encoding
        assert torch.equal(theta, before)
        steady = received(published.change, steady)
        if version % 4 == 3:
            lag += 1
            continue
        lagging = received(published.values if lag else published.change, None if lag else lagging)
        lag = 0
        assert same_bits(steady, received(published.values, None))
        assert same_bits(steady, lagging)


@pytest.mark.parametrize(("encoding", "share"), [("int8", 1 / 254), ("int4", 1 / 14)])
def test_what_a_change_lost_is_in_the_next_ones(encoding: str, share: float) -> None:
    """The anchor stays with theta while theta moves, and closes in on it (as far as bfloat16 can) once it rests.

    `share` of the largest change is what its encoding loses at most; 2^-8 of a value is what bfloat16 does.
    """
    theta = random_values(5000, seed=0)
    values = arithmetic.Values(theta, [])
    published = arithmetic.publish(values, encoding)
    off_max = 0.0
    for version in range(1, 101):
        theta += 0.01 * random_values(5000, seed=version)
        change_max = float((theta - decoded(published.values)).abs().max())
        published = arithmetic.publish(values, encoding, published)
        off = (theta - decoded(published.values)).abs() - theta.abs() / 256
        assert float(off.max()) <= 1.02 * share * change_max + 1e-6
        off_max = max(off_max, float(off.max()))
    assert off_max < 0.05, "100 changes of 0.01 add up, what they lost does not"

    for _ in range(20):
        published = arithmetic.publish(values, encoding, published)
    off = (theta - decoded(published.values)).abs() - theta.abs() / 256
    assert float(off.max()) <= share / (1 - share) * float(theta.abs().max()) / 256


@pytest.mark.parametrize("encoding", VALUES)
def test_where_values_are_sent_nothing_else_is_made(encoding: str) -> None:
    theta = random_values(1000, seed=0)
    first = arithmetic.publish(arithmetic.Values(theta, []), encoding)
    second = arithmetic.publish(arithmetic.Values(theta, []), encoding, first)
    assert first == second == arithmetic.Published(encode_payload(theta, encoding), None)


def test_a_learner_takes_changes_and_the_values_that_they_begin_with() -> None:
    assert [pull_encodings(e) for e in ("float32", "bfloat16", "int4")] == [
        ("float32",), ("bfloat16",), ("int4", "bfloat16")
    ]  # fmt: skip


def test_an_anchor_saturates_instead_of_becoming_infinite() -> None:
    largest = torch.finfo(torch.float32).max
    base = encode_payload(torch.tensor([3e38, -3e38, 1.0]), "bfloat16")
    change, anchor = encode_change(torch.tensor([largest, -largest, 1.0]), base, "int8")
    assert decoded(anchor).tolist() == [torch.finfo(torch.bfloat16).max, -torch.finfo(torch.bfloat16).max, 1.0]
    assert same_bits(received(change, decoded(base)), decoded(anchor))


def test_what_cannot_be_a_change_is_refused() -> None:
    base = encode_payload(torch.ones(4), "bfloat16")
    with pytest.raises(NotFinite, match="element 2"):
        encode_change(torch.tensor([1.0, 1.0, torch.nan, 1.0]), base, "int8")
    with pytest.raises(BadPayload, match="there are 5 values, but the anchor has 4"):
        encode_change(torch.ones(5), base, "int8")
    change, _ = encode_change(torch.zeros(4), base, "int8")
    with pytest.raises(BadPayload, match="4 elements, what it is added to 5"):
        decode_version(change, torch.ones(5))


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_a_cluster_that_pulls_changes_trains_as_one_that_pulls_values(encoding: str) -> None:
    before = mean_loss(TinyText())
    exact, _ = trained("float32")
    by_changes, pulled = trained(encoding)
    assert mean_loss(exact) < 0.95 * before
    assert abs(mean_loss(by_changes) - mean_loss(exact)) < 0.05 * (before - mean_loss(exact))
    assert pulled.keys() == {"bfloat16", encoding}
    assert pulled[encoding] == LEARNERS * FRAGMENTS * STEPS // EVERY, "every version but the first comes as a change"


LEARNERS, FRAGMENTS, STEPS, EVERY = 3, 3, 80, 4


def trained(pull: str) -> tuple[TinyText, Counter[str]]:
    """A model after 20 versions of each fragment, and the pulls by encoding; all anchors are compared at each step."""
    settings = make_settings(
        sync={"pull": pull, "fragments": FRAGMENTS, "sync_every": EVERY, "quorum": "all", "merge": "mean"},
        outer={"optimizer": "nesterov", "lr": 0.7, "momentum": 0.5},
    )
    cluster = Lockstep(settings)
    models = [TinyText() for _ in range(LEARNERS)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=5e-3) for model in models]
    for i, model in enumerate(models):
        cluster.join(f"learner-{i}", model)
    for step in range(STEPS):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inner_step(model, optimizer, batch_of(i, step))
            cluster.stepped(f"learner-{i}", tokens=48)
        cluster.exchange()
        for fragment_id in range(FRAGMENTS):
            published = decoded(cluster.shards[0].shard.published(fragment_id)[1])
            for learner in cluster.learners.values():
                anchor = learner.core.fragments[fragment_id].tensors.anchor
                assert anchor is not None
                assert same_bits(anchor.float(), published)
    return models[0], sum((learner.pulled for learner in cluster.learners.values()), Counter())


def batch_of(learner: int, step: int) -> Tensor:
    """Each learner has four batches of its own."""
    return make_batch(1000 * learner + step % 4)


@torch.no_grad()
def mean_loss(model: TinyText) -> float:
    return fmean(float(model.loss(batch_of(learner, step))) for learner in range(LEARNERS) for step in range(4))
