"""Residuals that a learner keeps in host memory are those that it would have kept beside the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diloco_common.manifest import cut
from diloco_common.messages import LearnerPolicy
from diloco_worker.core.replica import Replica
from diloco_worker.core.tensors import FragmentTensors

POLICY = LearnerPolicy(5, "int8", "float32", "carry", 0.5, True)
MERGED = (True, True, False, True)


def contributions(stowed: list[Tensor] | None) -> list[Any]:
    """What a learner sends in four rounds, of which the third does not merge it. `stowed`: it keeps residuals there."""
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
        for number, is_merged in enumerate(MERGED, start=1):
            model.weight.add_(torch.randn_like(model.weight))
            payload = tensors.contribute(number).encode(POLICY.push_encoding)
            sent += [bytes(chunk) for chunk in payload.chunks]
            if not is_merged:
                tensors.give_back()
            version = version - torch.randn_like(version)
            tensors.carry(version.clone(), merged=is_merged)
            sent.append(model.weight.flatten().tolist())
    return sent


def test_they_give_the_same_contributions_wherever_they_are() -> None:
    stowed: list[Tensor] = []
    assert contributions(stowed) == contributions(None)
    assert len(stowed) == len(MERGED), "one of each contribution"
    assert all(loss.abs().max() > 0 for loss in stowed)
