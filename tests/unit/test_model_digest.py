"""The digest of a model: what a shard is told to insist on."""

from __future__ import annotations

import pytest

from diloco_common.settings import ModelSettings, Settings
from diloco_common.wire.manifest import TensorSpec, model_digest
from diloco_demo import cli
from diloco_demo.cli import gpt_tensors
from diloco_demo.gpt import build_gpt
from diloco_demo.training import make_optimizer
from diloco_worker import digest_of

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
