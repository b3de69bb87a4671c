"""A model in 16 bits rounds the versions that it gets: that is nothing it has trained."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from test_learner_core import EPOCH, delta_of_snapshot
from torch import Tensor, nn

from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, LearnerPolicy
from diloco_worker.core.copies import find_copies
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet

DTYPES = torch.float32, torch.bfloat16, torch.float16
SIXTEEN = DTYPES[1:]


class Rig:
    """A learner with one fragment: a matrix, one that is laid out otherwise, and one in float32."""

    def __init__(self, dtype: torch.dtype, copies: torch.dtype | None = None) -> None:
        """`copies`: the optimizer keeps such copies of the parameters."""
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.a = nn.Parameter(torch.randn(40, 50).to(dtype))
        self.model.b = nn.Parameter(torch.randn(50, 40).to(dtype).t())
        self.model.c = nn.Parameter(torch.randn(30).to(dtype))
        chosen = SharedSet(self.model)
        self.replica = Replica(chosen)
        self.copies = {}
        if copies is not None:
            self.copies = {name: p.detach().to(copies, copy=True) for name, p in self.model.named_parameters()}
            self.replica.keep_copies(find_copies(self.copies.get, chosen))
        policy = LearnerPolicy(4, "float32", "float32")
        (self.fragment,) = cut(self.replica.specs, 1, 1).fragments
        self.core = LearnerCore(self.replica, cut(self.replica.specs, 1, 1), policy)

    def contributes(self, round_number: int) -> Tensor:
        self.core.stepped(5)
        self.core.collect(Collect(0, round_number, EPOCH), EPOCH)
        (taken,) = self.core.contribute()
        return delta_of_snapshot(taken)

    @torch.no_grad()
    def arrives(self, version: int, values: Tensor, merged: int = 0) -> None:
        self.core.arrived(0, version, EPOCH, values, merged)

    def version(self, dtype: torch.dtype) -> Tensor:
        """Numbers of many sizes, so that elements move far, too."""
        n = self.fragment.num_elements
        smallest = -8.0 if self.replica.rounds(self.fragment, dtype) else -3.0  # elsewhere it is one float32 addition
        return (torch.randn(n).sign() * 10 ** torch.empty(n).uniform_(smallest, 0)).to(dtype)

    @torch.no_grad()
    def theta(self) -> Tensor:
        return torch.cat([p.reshape(-1) for p in (self.model.a, self.model.b, self.model.c)])


@pytest.mark.parametrize(("model", "pull"), list(product(SIXTEEN, DTYPES[:2])))
@pytest.mark.parametrize("copies", [None, torch.bfloat16])
def test_who_trains_nothing_contributes_nothing(
    model: torch.dtype, pull: torch.dtype, copies: torch.dtype | None
) -> None:
    rig = Rig(model, copies if model == copies else None)
    rig.arrives(0, rig.version(pull))
    for number in range(1, 8):
        assert not rig.contributes(number).any()
        values = rig.version(pull)
        rig.arrives(number, values, merged=number if number % 2 else 0)
        assert torch.equal(rig.theta(), values.to(model))


@pytest.mark.parametrize("model", SIXTEEN)
def test_a_master_is_rounded_into_its_parameter_and_contributes_nothing_of_that(model: torch.dtype) -> None:
    rig = Rig(model, copies=torch.float32)
    rig.arrives(0, rig.version(torch.float32))
    for number in range(1, 4):
        assert not rig.contributes(number).any()
        values = torch.rand(rig.fragment.num_elements) + number  # so that float32 subtracts them without an error
        rig.arrives(number, values, merged=number)
        master = torch.cat([copy.reshape(-1) for copy in rig.copies.values()])
        torch.testing.assert_close(master, values, rtol=0, atol=1e-6)
        rig.arrives(number, master)  # what is left of it is float32's own


@pytest.mark.parametrize("model", SIXTEEN)
def test_what_was_trained_is_carried_without_the_rounding(model: torch.dtype) -> None:
    rig = Rig(model)
    n = rig.fragment.num_elements
    rig.arrives(0, 1 + 0.75 * torch.rand(n))
    with torch.no_grad():
        for parameter in rig.model.parameters():
            parameter.add_(0.125)
    rig.arrives(1, 2.25 + torch.rand(n) / 2)
    torch.testing.assert_close(rig.contributes(2), torch.full((n,), -0.125), rtol=0, atol=0)
