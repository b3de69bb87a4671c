"""Other values in the model for the time of a `with`: which ones, what is undone, and what is refused meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet, as_module
from diloco_worker.shell.other_values import OtherValues, beside, write
from parts import Rig


class Net(nn.Module):
    """What a model has beside shared parameters: statistics, a head of its own, and a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(3, 4).bfloat16(), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("codes", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.body(x.bfloat16()).float())
        self.codes = self.codes + hidden.detach().mean(0)
        return self.head(hidden)


def bits(model: nn.Module) -> list[list[int]]:
    tensors = [*model.parameters(), *model.buffers()]
    return [t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if t.dim() else [int(t)] for t in tensors]


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_whatever_the_body_does_to_the_model_is_undone_bit_for_bit(error: type[BaseException] | None) -> None:
    net = Net()
    with torch.no_grad():
        net.body.weight[0] = torch.tensor([-0.0, float("nan"), 1e-40])
    before, objects = bits(net), [id(b) for b in net.buffers()]
    others = OtherValues(Replica(SharedSet(net, private="head.*")), lambda: None)
    pairs = others.beside({name: torch.ones_like(p) for name, p in net.named_parameters()})

    def body() -> None:
        with others.instead("values()", partial(write, pairs), [theta for theta, _ in pairs]):
            assert all(p.eq(1).all() for p in net.parameters())
            net.train()(torch.randn(5, 3))
            if error is not None:
                raise error

    with nullcontext() if error is None else pytest.raises(error):
        body()
    assert bits(net) == before
    assert [id(b) for b in net.buffers()] == objects
    others.check()  # it is over


def averaged() -> nn.Module:
    return AveragedModel(Net())


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (Net, Net),
        (Net, averaged),
        (Net, lambda: averaged().state_dict()),
        (Net, lambda: torch.compile(Net()).state_dict()),
        (lambda: torch.compile(Net()), lambda: Net().state_dict()),
        (lambda: [Net(), Net()], lambda: [Net(), Net()]),
        (lambda: {"actor": Net()}, lambda: {"actor": averaged()}),
        (lambda: {"actor": Net()}, lambda: nn.ModuleDict({"actor": Net()}).state_dict()),
    ],
    ids=["module", "averaged", "its-state", "compiled-state", "into-compiled", "list", "dict", "dict-state"],
)  # fmt: skip
def test_values_find_their_tensors_whatever_wraps_the_one_or_the_other(
    model: Callable[[], Any], values: Callable[[], Any]
) -> None:
    module = as_module(model())
    found = beside(module, values())
    assert {t.data_ptr() for t, _ in found} == {t.data_ptr() for t in (*module.parameters(), *module.buffers())}


def test_what_is_not_named_stays_and_dtypes_are_those_of_the_model() -> None:
    net = Net()
    before = net.norm.weight.clone()
    write(beside(net, {"body.weight": torch.full((4, 3), 1.5, dtype=torch.float64)}))
    assert net.body.weight.eq(1.5).all()
    assert net.body.weight.dtype == torch.bfloat16
    assert torch.equal(net.norm.weight, before)


def test_the_newest_global_values_are_in_the_model_and_then_no_longer() -> None:
    rig = Rig()
    rig.steps(by=2.0)
    rig.arrives(0, 1, 20.0)
    rig.learner.poll()
    with rig.learner.global_values():
        assert rig.values == [20.0, 10.0]
        rig.arrives(1, 1, 30.0)
    assert rig.values == [22.0, 12.0], "what has arrived meanwhile waits"
    rig.learner.poll()
    assert rig.values == [22.0, 32.0]


def test_who_restores_a_checkpoint_trains_on_from_it_and_contributes_the_way_there() -> None:
    rig = Rig()
    rig.steps(by=2.0)
    rig.learner.restore({"0": torch.full((1,), 5.0), "1": torch.full((1,), 6.0)})
    rig.asks()
    rig.steps(by=1.0)
    assert rig.contributed() == [4.0, 3.0]
