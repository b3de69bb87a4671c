"""Nothing that was trained is lost or doubled, however the encoding rounds and whatever becomes of a push."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from builders import decoded, random_values
from diloco_common.errors import BadChecksum
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, LearnerPolicy, Outcome, PushAnswer
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica

SIZE = 1000
LATE = PushAnswer(Outcome.LATE)
REFUSED = PushAnswer(Outcome.REJECTED, BadChecksum.code, "too large")
ACCEPTED = PushAnswer(Outcome.ACCEPTED)
ROUNDING = 2.0**-8
"""Share of itself that an element of a residual may lose as bfloat16."""


class OneTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(random_values(SIZE, seed=99))


@pytest.mark.parametrize("on_commit", ["carry", "overwrite"])
@pytest.mark.parametrize("encoding", ["int8", "int4", "bfloat16"])
@pytest.mark.parametrize(
    "fates", [["merged"], ["merged", "late", "refused", "dropped", "asked twice"]], ids=["good", "bad"]
)
@torch.no_grad()
def test_what_was_sent_and_what_is_left_add_up_to_what_was_meant(
    on_commit: str, encoding: str, fates: list[str]
) -> None:
    """Under carry, what is meant is all local training; under overwrite, that of the merged contributions."""
    chance = random.Random(encoding)
    model = OneTensor()
    replica = Replica(model)
    core = LearnerCore(replica, cut(replica.specs, 1, 1), LearnerPolicy(1, encoding, "float32", on_commit, 0.5, True))
    world = model.w.detach().clone()
    core.arrived(0, 0, 1, world.clone(), 0)

    sent = torch.zeros(SIZE, dtype=torch.float64)
    meant = torch.zeros(SIZE, dtype=torch.float64)
    rounded = torch.zeros(SIZE, dtype=torch.float64)
    tokens_merged = last_merged = 0

    def train(seed: int) -> torch.Tensor:
        move = 0.01 * random_values(SIZE, seed)
        model.w.sub_(move)
        core.stepped(tokens=10)
        return move

    for version in range(1, 41):
        fate = chance.choice(fates)
        move = train(version)
        core.collect(Collect(0, version, 1), epoch=1)
        (contribution,) = core.contribute()
        progress = contribution.tensors.take_snapshot().double()
        tokens = contribution.tokens
        before = contribution.tensors.residual
        payload = contribution.tensors.encode(encoding)
        loss = contribution.tensors.loss.double()
        if fate == "asked twice":
            core.collect(Collect(0, version, 1), epoch=1)
            assert core.contribute() == [contribution], "the contribution under way is offered again"
        late_move = train(1000 + version)  # between the snapshot and the version
        if fate == "late":
            core.answered(0, version, LATE)
        elif fate == "refused":
            core.answered(0, version, REFUSED)
        else:
            core.answered(0, version, ACCEPTED)
        world += 0.02 * random_values(SIZE, 2000 + version)  # the others' work
        if fate in ("merged", "asked twice"):
            pushed = decoded(payload)
            world -= pushed
            sent += pushed.double()
            tokens_merged += tokens
            last_merged = version
            rounded += ROUNDING * loss.abs()
            if on_commit == "overwrite":
                meant += progress
        elif before is not None:  # the next contribution takes the loss back, and rounds what it was before
            rounded += ROUNDING * (3 * loss.abs() + (loss + decoded(payload) - progress).abs())
        if on_commit == "carry":
            meant += (move + late_move).double()
        assert core.arrived(0, version, 1, world.clone(), last_merged)

    train(seed=3000)
    meant += 0.01 * random_values(SIZE, 3000).double()
    core.collect(Collect(0, 41, 1), epoch=1)
    (contribution,) = core.contribute()
    held = decoded(contribution.tensors.encode(encoding)).double()
    left = held + contribution.tensors.loss.double()  # the residual, and what no contribution held yet
    rounded += ROUNDING * contribution.tensors.take_snapshot().double().abs()  # what it is off stays in the model

    assert ((sent + left - meant).abs() <= 2e-5 + rounded).all()
    assert float(sent.abs().max()) > 0.01, "nothing was sent"
    if on_commit == "carry":
        assert tokens_merged + contribution.tokens == core.tokens
    assert core.contributions["merged"] + core.contributions["carried"] == 40


@torch.no_grad()
def test_without_error_feedback_what_the_encoding_lost_is_gone() -> None:
    """Or the test above would not show that it is the feedback that keeps the sum."""
    replica = Replica(model := OneTensor())
    core = LearnerCore(replica, cut(replica.specs, 1, 1), LearnerPolicy(1, "int4", "float32", "carry", 0.5, False))
    core.arrived(0, 0, 1, model.w.detach().clone(), 0)
    model.w.sub_(random_values(SIZE, 1))
    core.stepped(1)
    core.collect(Collect(0, 1, 1), epoch=1)
    (contribution,) = core.contribute()
    sent = decoded(contribution.tensors.encode("int4"))
    anchor = core.fragments[0].tensors.anchor
    assert anchor is not None
    core.arrived(0, 1, 1, anchor.float() - sent, 1)
    core.stepped(1)
    core.collect(Collect(0, 2, 1), epoch=1)
    (contribution,) = core.contribute()
    left = contribution.tensors.take_snapshot().double().abs()
    assert (left <= 2e-6 + ROUNDING * random_values(SIZE, 1).abs()).all(), "only what the snapshot was off"
    assert float((sent - random_values(SIZE, 1)).abs().max()) > 0.1
