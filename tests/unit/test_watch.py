"""What becomes of the parameters after a model has joined: followed, or refused by name at a boundary soon after."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from diloco_common.errors import ModelChanged
from diloco_worker.core.shared_set import Patterns, SharedSet
from diloco_worker.shell.watch import AT_ONCE, ModelWatch
from parts import Rig


class Net(nn.Module):
    """A body that is frozen, one that is trained, and a head that is tied to a table by its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.body = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)
        self.wte, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight.data = self.wte.weight.data


def new_storage(model: Net) -> None:
    for parameter in model.body.parameters():
        parameter.data = parameter.data.clone()


def permute(model: Net) -> None:
    model.body.weight.data = model.body.weight.data.T.contiguous().T


def retie(model: Net) -> None:
    model.wte.weight.data = model.head.weight.data = model.wte.weight.data.clone()


def unfreeze(model: Net) -> None:
    model.base.requires_grad_(True)


def freeze(model: Net) -> None:
    model.body.requires_grad_(False)


def metric(model: Net) -> None:
    model.metric = nn.Identity()


def untie(model: Net) -> None:
    model.head.weight.data = model.head.weight.data.clone()


def assign(model: Net) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def exchange(model: Net) -> None:
    model.body = nn.Linear(3, 3)


def add(model: Net) -> None:
    model.adapter = nn.Linear(3, 1)


def parametrize(model: Net) -> None:
    nn.utils.parametrizations.weight_norm(model.body)


def check(model: nn.Module, shared: Patterns | None, change: Callable[[Net], object], **more: Patterns) -> None:
    """At each boundary of a few steps."""
    watch = ModelWatch(SharedSet(model, shared, **more))
    watch.check()
    change(model)
    for _ in range(4):
        watch.check()
    watch.check_in_place()
    watch.end()
    assert not any(m._load_state_dict_post_hooks for m in model.modules())


@pytest.mark.parametrize("shared", [None, ["body.*", "wte.*"], "all"])
@pytest.mark.parametrize("change", [new_storage, permute, retie, metric, lambda m: m.body.bfloat16().float()])
def test_the_same_parameters_are_followed(change: Callable[[Net], object], shared: Patterns | None) -> None:
    check(Net(), shared, change)


ELSE = 'name at `join` what will ever be trained, shared=.* or shared="all"'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreeze, f"base.weight, base.bias: unfrozen since the model joined, and not shared; {ELSE}"),
        (freeze, f"body.weight, body.bias: frozen since the model joined; {ELSE}"),
        (add, f"adapter.weight, adapter.bias: added since the model joined.* build all of them before.*{ELSE}"),
        (parametrize, "body.parametrizations.weight.original0, .*: added since the model joined; body.weight: removed"),
        (exchange, "body.weight, body.bias: replaced by other tensors"),
        (assign, r"replaced by other tensors .*load_state_dict\(assign=True\)"),
        (untie, "wte.weight was tied to another parameter .* no longer is"),
        (lambda m: m.double(), r"is torch.float64 .* when the model joined it was torch.float32 .* on cpu: move"),
    ],
)  # fmt: skip
def test_another_model_is_refused_by_name(change: Callable[[Net], object], words: str) -> None:
    with pytest.raises(ModelChanged, match=words) as caught:
        check(Net(), None, change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [freeze, unfreeze, lambda m: (freeze(m), unfreeze(m))])
def test_what_was_named_is_frozen_and_unfrozen_freely(change: Callable[[Net], object]) -> None:
    check(Net(), "all", change)


def test_a_target_network_is_loaded_freely_and_what_is_shared_is_not() -> None:
    def syncs(model: nn.Module) -> None:
        model["target"].load_state_dict(model["q"].state_dict())

    q = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    both = nn.ModuleDict({"q": q, "target": copy.deepcopy(q).requires_grad_(False)})
    check(both, None, syncs)
    check(both, None, syncs, private="target.*")
    for part in (both, q, q[1]):
        with pytest.raises(ModelChanged, match="load_state_dict has overwritten the model"):
            check(both, None, lambda _, part=part: part.load_state_dict(part.state_dict()))
    with pytest.raises(ModelChanged, match="load_state_dict has overwritten the model"):
        check(both, "all", syncs)


@pytest.mark.parametrize("where", [0, AT_ONCE + 1, 3 * AT_ONCE - 1])
def test_in_a_large_model_the_turn_of_each_comes(where: int) -> None:
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3 * AT_ONCE))
    watch = ModelWatch(SharedSet(model))
    model[where].weight.requires_grad_(False)
    words = []
    for _ in range(3):
        try:
            watch.check()
        except ModelChanged as error:
            words.append(str(error))
    (found,) = words
    assert found.startswith(f"{where}.weight: frozen")


def test_a_shared_tensor_that_is_frozen_contributes_nothing_and_gets_versions() -> None:
    rig = Rig()
    rig.model[0].requires_grad_(False)
    rig.asks()
    with torch.no_grad():
        rig.model[1].add_(2.0)
    rig.learner.step(tokens=8)
    assert rig.contributed() == [0.0, -2.0]
    rig.arrives(0, 1, 15.0)
    rig.learner.poll()
    assert rig.values == [15.0, 12.0]
    rig.model[0].requires_grad_(True)
    rig.steps()
    assert rig.values == [17.0, 14.0]


class Sam:
    """Sharpness-aware minimisation, as it is usually written: climb, and restore what was kept by `p.data = old`."""

    def __init__(self, parameters, base: torch.optim.Optimizer, rho: float = 0.5) -> None:
        self.parameters, self.base, self.rho = list(parameters), base, rho
        self.old: dict[nn.Parameter, Tensor] = {}

    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters]).norm()
        for p in self.parameters:
            self.old[p] = p.data.clone()
            with torch.no_grad():
                p.add_(p.grad * self.rho / norm)
            p.grad = None

    def second_step(self) -> None:
        for p in self.parameters:
            p.data = self.old[p]
        self.base.step()
        self.base.zero_grad()
