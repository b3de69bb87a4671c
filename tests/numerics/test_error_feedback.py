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


@pytest.mark.parametrize("encoding", ["int8", "int4", "bfloat16"])
@pytest.mark.parametrize(
    "fates", [["merged"], ["merged", "late", "refused", "dropped", "asked twice"]], ids=["good", "bad"]
)
@torch.no_grad()
def test_what_was_sent_and_what_is_left_add_up_to_all_local_training(encoding: str, fates: list[str]) -> None:
    chance = random.Random(encoding)
    model = OneTensor()
    replica = Replica(model)
    core = LearnerCore(replica, cut(replica.specs, 1, 1), LearnerPolicy(1, encoding, "float32"))
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
        tokens = contribution.tokens
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
        meant += (move + late_move).double()
        assert core.arrived(0, version, 1, world.clone(), last_merged)

    train(seed=3000)
    meant += 0.01 * random_values(SIZE, 3000).double()
    core.collect(Collect(0, 41, 1), epoch=1)
    (contribution,) = core.contribute()
    held = decoded(contribution.tensors.encode(encoding)).double()
    left = held + contribution.tensors.loss.double()  # the residual, and what no contribution held yet
    rounded += ROUNDING * contribution.tensors.snapshot.double().abs()  # what it is off stays in the model

    assert ((sent + left - meant).abs() <= 2e-5 + rounded).all()
    assert float(sent.abs().max()) > 0.01, "nothing was sent"
    assert tokens_merged + contribution.tokens == core.tokens
    assert core.contributions["merged"] + core.contributions["carried"] == 40
