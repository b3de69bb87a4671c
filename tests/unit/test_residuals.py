"""Residuals that a learner keeps in host memory are those that it would have kept beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import decoded
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import LearnerPolicy
from diloco_worker.core.replica import Replica
from diloco_worker.core.tensors import FragmentTensors

POLICY = LearnerPolicy(5, "int8", "float32", "carry", 0.5, True)


def contributions(stowed: list[Tensor] | None, merged: Sequence[bool]) -> list[Any]:
    """What a learner sends in as many rounds, and its model then. `stowed`: it keeps residuals there."""
    torch.manual_seed(0)
    model = nn.Linear(30, 40, bias=False)
    replica = Replica(model)
    if stowed is not None:
        replica.stow = lambda loss: stowed.append(loss.clone()) or stowed[-1]
    (fragment,) = cut(replica.specs, 1, 1).fragments
    tensors = FragmentTensors(replica.held(fragment), replica, POLICY)
    version = model.weight.detach().flatten().clone()
    sent: list[Any] = []
    with torch.no_grad():
        tensors.adopt(version.clone())
        for number, is_merged in enumerate(merged, start=1):
            model.weight.add_(torch.randn_like(model.weight))
            payload = tensors.contribute(number).encode(POLICY.push_encoding)
            sent.append(payload)
            if not is_merged:
                tensors.give_back()
            version = version - torch.randn_like(version)
            tensors.carry(version.clone(), merged=is_merged)
            sent.append(model.weight.flatten().tolist())
    return sent


def test_they_give_the_same_contributions_wherever_they_are() -> None:
    stowed: list[Tensor] = []
    assert contributions(stowed, [True] * 3) == contributions(None, [True] * 3)
    assert len(stowed) == 3, "one of each contribution"
    assert all(loss.abs().max() > 0 for loss in stowed)


def test_what_is_taken_back_where_they_lie_beside_the_model_is_the_same_but_for_its_rounding() -> None:
    stowed: list[Tensor] = []
    *_, kept, kept_model = contributions(stowed, [True, False, True])
    *_, restored, restored_model = contributions(None, [True, False, True])
    step = float(decoded(kept).abs().max()) / 127
    off = (decoded(kept) - decoded(restored)).abs()
    assert off.max() <= 1.01 * step, "a code more or less, at most"
    assert (off < 0.01 * step).float().mean() > 0.95
    assert restored_model == pytest.approx(kept_model, abs=1e-5)
