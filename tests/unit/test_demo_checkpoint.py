"""The worker's own checkpoint: whole or refused, and never of another model or run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco_common.errors import EXIT_DATA, DataError
from diloco_common.settings import ModelSettings, TrainSettings
from diloco_demo import checkpoint
from diloco_demo.checkpoint import Saved, TrainingProgress, load_checkpoint, save_checkpoint
from diloco_demo.gpt import build_gpt
from diloco_demo.training import make_optimizer
from diloco_worker.view import LearnerState

PROGRESS = TrainingProgress(inner_step=3, tokens=96, data_position=12)


def learner(progress: TrainingProgress) -> dict[str, object]:
    """As `Learner.state_dict` gives it."""
    return LearnerState("r", "a", 0, progress.inner_step, progress.tokens, 0).as_dict()


def save(path: Path, model, optimizer, progress: TrainingProgress) -> None:
    save_checkpoint(path, model, optimizer, learner(progress), progress.data_position)


def model_and_optimizer(width=8, steps=0):
    model = build_gpt(ModelSettings(layers=1, heads=2, width=width, context=8), seed=0)
    optimizer = make_optimizer(model, TrainSettings())
    text = torch.arange(8)[None]
    for _ in range(steps):
        model.loss(text, text + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved(folder: Path) -> Path:
    path = folder / "worker" / "checkpoint.safetensors"
    save(path, *model_and_optimizer(steps=3), PROGRESS)
    return path


def flat_state(optimizer):
    return {(i, key): value for i, state in optimizer.state_dict()["state"].items() for key, value in state.items()}


def test_what_was_saved_comes_back(tmp_path):
    path = saved(tmp_path)
    model, optimizer = model_and_optimizer()
    assert load_checkpoint(path, model, optimizer, run_id="r") == Saved(learner(PROGRESS), PROGRESS)
    want_model, want_optimizer = model_and_optimizer(steps=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want_model.parameters(), strict=True))
    want = flat_state(want_optimizer)
    got = flat_state(optimizer)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], value) for key, value in want.items())
    assert {p.name for p in path.parent.iterdir()} == {path.name}


def test_another_model_or_run_is_refused_with_what_differs(tmp_path):
    path = saved(tmp_path)
    model, optimizer = model_and_optimizer(width=16)
    with pytest.raises(DataError, match=r"embedding.weight: \[256, 16\] <-> \[256, 8\]") as caught:
        load_checkpoint(path, model, optimizer, run_id="r")
    assert caught.value.exit_code == EXIT_DATA
    with pytest.raises(DataError, match="belongs to run 'r', but this is run 'other'"):
        load_checkpoint(path, *model_and_optimizer(), run_id="other")


def test_every_flipped_bit_and_every_cut_is_named_and_nothing_is_loaded(tmp_path):
    path = saved(tmp_path)
    good = path.read_bytes()
    model, optimizer = model_and_optimizer()
    at = torch.randint(len(good), (150,), generator=torch.Generator().manual_seed(0)).tolist()
    damaged = [good[:i] + bytes([good[i] ^ (1 << i % 8)]) + good[i + 1 :] for i in [*range(0, 1200, 7), *at]]
    for content in [b"", b"garbage", *damaged, *(good[:i] for i in at)]:
        path.write_bytes(content)
        with pytest.raises(DataError, match="is damaged") as caught:
            load_checkpoint(path, model, optimizer, run_id="r")
        assert str(path) in str(caught.value)
        assert not optimizer.state
    path.write_bytes(good)
    assert load_checkpoint(path, model, optimizer, run_id="r") == Saved(learner(PROGRESS), PROGRESS)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch, fails):
    path = saved(tmp_path)

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((checkpoint.os, "fsync") if fails == "fsync" else (Path, "replace")), broken)
    later = TrainingProgress(9, 9, 9)
    with pytest.raises(OSError, match="No space left"):
        save(path, *model_and_optimizer(steps=5), later)
    monkeypatch.undo()
    assert load_checkpoint(path, *model_and_optimizer(), run_id="r") == Saved(learner(PROGRESS), PROGRESS)
    save(path, *model_and_optimizer(steps=5), later)  # over what was left behind
    assert load_checkpoint(path, *model_and_optimizer(), run_id="r") == Saved(learner(later), later)
