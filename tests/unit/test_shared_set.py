"""Which parameters of a model are shared, private and frozen, by whatever name the user gives them."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.shell.frozen_tensors import declare


class Net(nn.Module):
    """A body that is frozen, a table tied to a head by object or by memory, and a scale that no gradient can reach."""

    def __init__(self, tied: str = "object") -> None:
        super().__init__()
        self.body, self.wte, self.head = nn.Linear(4, 4, bias=False), nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        if tied == "object":
            self.head.weight = self.wte.weight
        else:
            self.head.weight.data = self.wte.weight.data
        self.body.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
        self.register_buffer("queue", torch.zeros(3))


@pytest.mark.parametrize(
    ("shared", "private", "are_shared", "are_private", "are_frozen"),
    [
        (None, (), ["head.weight"], [], ["body.weight", "scale"]),
        ("all", (), ["body.weight", "head.weight"], [], ["scale"]),
        (["*.weight"], (), ["body.weight", "head.weight"], [], ["scale"]),
        ("wte.*", (), ["head.weight"], [], ["body.weight", "scale"]),
        ("all", ["wte.weight"], ["body.weight"], ["head.weight"], ["scale"]),
        (None, ["body.*", "queue"], ["head.weight"], ["body.weight"], ["scale"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tied", ["object", "memory"])
def test_patterns_say_what_is_shared_by_any_name_of_a_tied_parameter(
    tied, shared, private, are_shared, are_private, are_frozen
) -> None:
    chosen = SharedSet(Net(tied), shared, private)
    assert (list(chosen.shared), list(chosen.private), list(chosen.frozen)) == (are_shared, are_private, are_frozen)
    assert chosen.ties == ({"wte.weight": "head.weight"} if "head.weight" in are_shared else {})


def test_what_is_shared_by_name_does_not_depend_on_what_is_frozen_at_the_moment() -> None:
    one, other = Net(), Net().requires_grad_(False)
    assert Replica(SharedSet(one, "all")).specs == Replica(SharedSet(other, "all")).specs
    assert declare(SharedSet(one, "all")) == declare(SharedSet(other, "all"))


def test_what_is_private_is_not_compared() -> None:
    assert [t.name for t in declare(SharedSet(Net(), None, ["body.*", "queue"]))] == ["scale"]


@pytest.mark.parametrize("tied", ["object", "memory"])
def test_a_tie_is_one_tensor_to_the_run(tied: str) -> None:
    (spec,) = Replica(SharedSet(Net(tied), private="queue")).specs
    assert (spec.name, spec.rule) == ("head.weight", "mean")


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([nn.Linear(2, 1), nn.Linear(1, 2)], ["0.bias", "0.weight", "1.bias", "1.weight"]),
        ((nn.Linear(2, 1),), ["0.bias", "0.weight"]),
        ({"critic": nn.Linear(2, 1), "actor": torch.compile(nn.Linear(2, 1, bias=False))}, [
            "actor.weight", "critic.bias", "critic.weight",
        ]),
        (OrderedDict(net=nn.Linear(2, 1, bias=False)), ["net.weight"]),
    ],
)  # fmt: skip
def test_several_models_are_one_with_names_that_say_which(models, expected: list[str]) -> None:
    assert list(SharedSet(models).shared) == expected
