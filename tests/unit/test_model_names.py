"""Names of parameters: the user's own, whatever torch wraps around the model, and the same for equal models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from diloco_common.errors import UnsupportedModel
from diloco_common.settings import ModelSettings, Settings
from diloco_common.wire.manifest import TensorSpec, cut, model_digest
from diloco_demo import cli
from diloco_demo.cli import gpt_tensors
from diloco_demo.gpt import build_gpt
from diloco_demo.training import make_optimizer
from diloco_worker import digest_of
from diloco_worker.core.replica import Replica


class Model(nn.Module):
    """Submodules that are called as wrappers call what they wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
        self.layers[1].add_module("_orig_mod", nn.Linear(3, 1, bias=False))


NAMES = ["layers.0.weight", "layers.1._orig_mod.weight", "layers.1.weight", "module.bias", "module.weight"]


def with_wrapped_layers(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Model()
    for i, layer in enumerate(model.layers):
        model.layers[i] = wrap(layer)
    return model


@pytest.mark.parametrize(
    "make",
    [
        Model,
        lambda: torch.compile(Model()),
        lambda: checkpoint_wrapper(Model()),
        lambda: nn.DataParallel(Model()),
        lambda: with_wrapped_layers(checkpoint_wrapper),
        lambda: with_wrapped_layers(torch.compile),
        lambda: torch.compile(with_wrapped_layers(lambda layer: checkpoint_wrapper(torch.compile(layer)))),
        lambda: nn.DataParallel(offload_wrapper(torch.compile(with_wrapped_layers(checkpoint_wrapper)))),
    ],
    ids=["plain", "compiled", "checkpointed", "parallel", "layers-checkpointed", "layers-compiled", "nested", "all"],
)
def test_wrappers_of_torch_leave_no_trace_and_submodules_keep_their_names(make: Callable[[], nn.Module]) -> None:
    assert [spec.name for spec in Replica(make()).specs] == NAMES


class Own(nn.Module):
    """No wrapper that we know of: it is a part of the user's model."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.module = inside


def test_a_module_of_the_users_own_that_holds_another_is_no_wrapper() -> None:
    assert [spec.name for spec in Replica(Own(nn.Linear(2, 2))).specs] == ["module.bias", "module.weight"]


class Tied(nn.Module):
    """One tensor under three names, and one submodule at two places, defined in the order that is asked for."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding, head, shared = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False), nn.Linear(3, 3)
        head.weight = embedding.weight
        parts = {"t": embedding, "h": head, "s": shared, "a": shared}
        for letter in order:
            self.add_module(letter, parts[letter])
        self.register_parameter("z", embedding.weight)


@pytest.mark.parametrize("order", ["thsa", "hsat", "asth", "saht"])
def test_a_tied_tensor_has_the_smallest_of_its_names_so_that_equal_models_get_equal_digests(order: str) -> None:
    specs = Replica(Tied(order)).specs
    assert [spec.name for spec in specs] == ["a.bias", "a.weight", "h.weight"]
    assert cut(specs, 2, 1).digest == cut(Replica(Tied("thsa")).specs, 2, 1).digest


def test_two_tensors_that_would_share_a_name_are_refused() -> None:
    model = nn.DataParallel(nn.Linear(2, 2))
    model.register_parameter("weight", nn.Parameter(torch.zeros(2)))
    with pytest.raises(UnsupportedModel, match=r"two tensors are called weight .*rename the one"):
        Replica(model)


A, B = TensorSpec("a", (2, 3)), TensorSpec("b", (4,), rule="mean")


@pytest.mark.parametrize(
    "model",
    [
        ModelSettings(),
        ModelSettings(layers=1, heads=1, width=8, context=8),
        ModelSettings(layers=2, heads=4, width=256),  # each attention has as many outputs as there are bytes
        ModelSettings(layers=2, heads=2, width=40),
    ],
)
def test_the_digest_of_the_built_in_model_needs_no_model(model: ModelSettings) -> None:
    assert model_digest(gpt_tensors(model)) == digest_of(build_gpt(model, seed=0))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("average", [False, True])
def test_a_worker_prints_the_digest_of_what_it_will_declare(
    capsys: pytest.CaptureFixture[str], optimizer: str, average: bool
) -> None:
    changed = [f"--set=train.optimizer={optimizer}", f"--set=train.average_momentum={str(average).lower()}"]
    assert cli.main(["digest", "--set", "model.layers=1", *changed]) == 0
    settings = Settings.model_validate(
        {"model": {"layers": 1}, "train": {"optimizer": optimizer, "average_momentum": average}}
    )
    model = build_gpt(settings.model, seed=0)
    made = make_optimizer(model, settings.train)
    assert capsys.readouterr().out.strip() == digest_of(model, companions=made if average else None)
