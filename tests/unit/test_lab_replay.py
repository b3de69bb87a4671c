"""Many runs at once come to what each comes to alone, but for the rounding of sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_lab import batch, native, runner
from diloco_lab.arms import make_arm
from diloco_lab.batch import batches, run_batch
from diloco_lab.report import comparison

MODEL = {"layers": 2, "heads": 2, "width": 16, "context": 8}
TRAIN = {"batch": 2, "lr": 0.01, "muon_lr": 0.01}
THIN = {"push": "int4", "pull": "int8", "sync_every": 12}


def arm(learners: int = 2, lab: dict[str, Any] | None = None, **changed: dict[str, Any]) -> Any:
    tree: dict[str, Any] = {"run": {"tokens": 2 * 24 * learners * 2 * 8}, "model": MODEL, "lab": {"learners": learners}}
    tree["lab"] |= lab or {}
    return make_arm("arm", {**tree, **changed, "train": {**TRAIN, **changed.get("train", {})}})


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are of fewer tokens."""
    for module in (runner, batch):
        monkeypatch.setattr(module, "EVALUATION_TOKENS", 512)
        monkeypatch.setattr(module, "CURVE_TOKENS", 64)


@pytest.mark.parametrize(
    "one",
    [
        arm(train={"optimizer": "muon", "average_momentum": True}, sync=THIN),
        arm(3, lab={"speeds": [1.0, 1.0, 0.3], "drop": 0.3}),
        arm(3, lab={"kill_every": 0.5, "away": 6.0}),
        arm(lab={"method": "data-parallel"}),
        arm(1, lab={"method": "one-process", "batches": 3}),
    ],
    ids=["momentum", "lost", "deaths", "data-parallel", "one"],
)
def test_a_batch_comes_to_what_each_run_comes_to_alone(one: Any, short_text: None) -> None:
    """Where learners die, a batch that was read ahead is lost with one."""
    lossy = one.conditions.drop or one.conditions.kill_every  # another rate may lead to other decisions then
    pairs = [(one, 4)] if lossy else [(one, 4), (one.with_value("train.lr", 0.005), 5)]
    together = run_batch(pairs, torch.device("cpu"), 1)
    assert together is not None
    mine, alone = [*together][-1], runner.run(*pairs[-1])["result"]
    assert mine["stepped_by"] == ("torch" if isinstance(native.find(), str) else "C")
    assert mine.get("versions") == alone.get("versions")
    for figure in ("loss_first", "loss_select", "loss"):
        assert mine[figure] == pytest.approx(alone[figure], rel=1e-3 if lossy else 1e-4)


def test_what_may_differ_in_a_batch_is_of_rates_and_rules() -> None:
    one = arm()
    rates = [
        one.with_value(path, value) for path, value in (("train.lr", 1e-3), ("outer.lr", 1.0), ("sync.merge", "mean"))
    ]
    other = one.with_value("sync.sync_every", 12)
    found = batches([(of, seed) for of in (one, *rates, other) for seed in (0, 1)], torch.device("cpu"), 1)
    assert [len(some) for some in found] == [8, 2]
    noisy = arm(lab={"noise": 0.1})
    assert len(batches([(noisy, 0), (noisy, 1)], torch.device("cpu"), 1)) == 2, "noise is drawn by the seed"


def test_it_is_said_why_torch_steps_and_written_who_did(
    short_text: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "find", lambda: "they have not been built")
    monkeypatch.setattr(runner, "choose_device", lambda _: torch.device("cpu"))
    path, arms, said = tmp_path / "r.jsonl", [arm(), arm(lab={"method": "classic"})], list[str]()
    lines = runner.run_all(arms, [0], path, 1, said.append)
    assert said[0] == "no native inner steps, torch does them: they have not been built"
    assert [text for text in said if "native" in text] == said[:1]
    assert {line["result"].pop("stepped_by") for line in lines.values()} == {"torch"}

    path.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))  # as of before this was written
    said.clear()
    assert runner.run_all(arms, [0], path, 1, said.append) == lines
    assert said == [f"2 of 2 runs are in {path} already"]
    assert "arm" in comparison(arms, [0], lines)
