"""The formulas for what a learner holds and moves, against the tensors that it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diloco_common.codec import encode_payload
from diloco_common.wire.manifest import cut
from diloco_planner.sizes import learner_bytes
from diloco_worker.core.replica import Replica
from diloco_worker.core.tensors import FragmentTensors


def num_bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def payload_bytes(payload: Any) -> int:
    return int(payload.header.num_bytes)


@pytest.mark.parametrize("pull", ["bfloat16", "float32"])
def test_a_learner_holds_the_tensors_that_are_counted(pull: str) -> None:
    """One fragment: contributed, merged, and on its way once more, with the version that holds it."""
    model = torch.nn.Linear(300, 700, bias=False)
    replica = Replica(model, None)
    (fragment,) = cut(replica.specs, 1, 1).fragments
    tensors = FragmentTensors(replica.held(fragment), replica, "int8")
    dtype = torch.bfloat16 if pull == "bfloat16" else torch.float32
    values = model.weight.detach().flatten().to(dtype)
    with torch.no_grad():
        tensors.adopt(values)
        tensors.contribute(1).encode("int8")
        tensors.carry(values, merged=True)
        kept = num_bytes(values, tensors._residual)
        contribution = tensors.contribute(2)
        payload = contribution.encode("int8")
        came = encode_payload(values, pull)
        difference = values.float() - contribution.snapshot

    most = learner_bytes(fragment.num_elements, 1, pull=pull)

    assert most.kept == kept
    assert (most.pushed, most.pulled) == (payload_bytes(payload), payload_bytes(came))
    moving = num_bytes(contribution.snapshot, contribution.loss, difference) + payload_bytes(payload)
    assert most.under_way == moving + payload_bytes(came)
