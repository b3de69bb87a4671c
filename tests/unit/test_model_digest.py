"""The digest of a model: what a shard is told to insist on."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch
from torch import nn

from diloco_common.settings import ModelSettings, Settings, TrainSettings
from diloco_common.wire.manifest import Momentum, TensorSpec, companion_of, model_digest
from diloco_demo import cli
from diloco_demo.cli import declared_digest, gpt_tensors
from diloco_demo.gpt import build_gpt
from diloco_demo.training import make_optimizer
from diloco_worker import digest_of
from parts import Parts

A, B = TensorSpec("a", (2, 3)), TensorSpec("b", (4,), rule="mean")


def test_the_order_of_the_tensors_does_not_matter() -> None:
    assert model_digest([A, B]) == model_digest([B, A])
    assert re.fullmatch("[0-9a-f]{32}", model_digest([A, B]))


@pytest.mark.parametrize("other", [[A], [A, B._replace(rule="run")], [A._replace(shape=(3, 2)), B],
                                   [A._replace(name="c"), B], [A, B, B]])  # fmt: skip
def test_whatever_differs_gives_another_digest(other: list[TensorSpec]) -> None:
    assert model_digest(other) != model_digest([A, B])


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


def adamw_for_the_layers(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Embedding and output head are not trained, and have no companion."""
    return torch.optim.AdamW([p for name, p in model.named_parameters() if name.startswith("layers.")], lr=settings.lr)


@pytest.mark.parametrize("average", [False, True])
def test_the_digest_is_of_what_an_optimizer_of_others_keeps(average: bool) -> None:
    settings = Settings.model_validate(
        {
            "model": {"layers": 1},
            "train": {"optimizer": f"{__name__}:adamw_for_the_layers", "average_momentum": average},
        }
    )
    model = build_gpt(settings.model, seed=0)
    made = make_optimizer(model, settings.train) if average else None
    assert declared_digest(settings) == digest_of(model, companions=made)


def test_the_digest_tells_kinds_of_momentum_apart() -> None:
    assert len({model_digest([A, companion_of(A, kind)]) for kind in get_args(Momentum)}) == 3


def test_a_worker_says_how_many_buffers_and_how_many_companions_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry, said = Parts().telemetry, list[dict[str, object]]()
    monkeypatch.setattr(telemetry.log, "event", lambda event, **facts: said.append(facts))
    statistic = TensorSpec("mean", (3,), "mean", "buffer")
    for declared in ([A, B], [A, companion_of(A, "Adam")], [A, companion_of(A, "Adam"), statistic, statistic]):
        telemetry.model(declared, 0)
    beside = [{word: facts[word] for word in ("companions", "buffers") if word in facts} for facts in said]
    assert beside == [{}, {"companions": 1}, {"companions": 1, "buffers": 2}]
