"""Many runs at once come to what each comes to alone, but for the rounding of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diloco_lab.arms import make_arm
from diloco_lab.batch import batches
from diloco_lab.runner import run, run_together

MODEL = {"layers": 2, "heads": 2, "width": 16, "context": 8}
TRAIN = {"batch": 2, "lr": 0.01, "muon_lr": 0.01}
THIN = {"push": "int4", "pull": "int8", "sync_every": 12}


def arm(learners: int = 3, lab: dict[str, Any] | None = None, **changed: dict[str, Any]) -> Any:
    tokens = 2 * 24 * learners * 2 * 8
    tree: dict[str, Any] = {"run": {"tokens": tokens}, "model": MODEL, "lab": {"learners": learners, **(lab or {})}}
    return make_arm("arm", {**tree, **changed, "train": {**TRAIN, **changed.get("train", {})}})


@pytest.mark.parametrize(
    "one",
    [
        arm(train={"optimizer": "muon"}),
        arm(train={"optimizer": "adamw"}, sync={"merge": "rda"}),
        arm(train={"optimizer": "muon", "average_momentum": True}, sync=THIN),
        arm(train={"optimizer": "adamw", "average_momentum": True}, outer={"momentum": 0.9}),
        arm(lab={"speeds": [1.0, 1.0, 0.3], "drop": 0.3}),
        arm(lab={"kill_every": 0.5, "away": 6.0}),
        arm(lab={"method": "data-parallel"}),
        arm(1, lab={"method": "one-process", "batches": 3}),
    ],
    ids=["muon", "adamw, rda", "thin, momentum", "adamw, momentum", "slow, lost", "deaths", "data-parallel", "one"],
)
def test_a_batch_comes_to_what_each_run_comes_to_alone(one: Any) -> None:
    """Where learners die, a batch that was read ahead is lost with one."""
    pairs = [(one, 3), (one.with_value("train.lr", 0.005), 4)]
    together = run_together(batches(pairs, torch.device("cpu"), 1)[0])
    for line, (of, seed) in zip(together, pairs, strict=False):
        alone = run(of, seed)
        assert line["key"] == alone["key"]
        for figure in ("loss_first", "loss_select", "loss"):
            assert line["result"][figure] == pytest.approx(
                alone["result"][figure], rel=1e-3 if of.conditions.kill_every else 1e-4
            )
        assert line["result"].keys() == alone["result"].keys()
        assert {line["result"].get(figure) for figure in ("versions",)} == {alone["result"].get("versions")}


def test_what_may_differ_in_a_batch_is_of_rates_and_rules() -> None:
    one = arm()
    rates = [
        one.with_value(path, value) for path, value in (("train.lr", 1e-3), ("outer.lr", 1.0), ("sync.merge", "mean"))
    ]
    other = one.with_value("sync.sync_every", 12)
    found = batches([(of, seed) for of in (one, *rates, other) for seed in (0, 1)], torch.device("cpu"), 1)
    assert [len(batch) for batch in found] == [8, 2]
    noisy = arm(lab={"noise": 0.1})
    assert len(batches([(noisy, 0), (noisy, 1)], torch.device("cpu"), 1)) == 2, "noise is drawn by the seed"
