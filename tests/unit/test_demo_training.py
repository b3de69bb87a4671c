"""The loop: it learns, stops when told, and goes on after a restart as if nothing had been."""

from __future__ import annotations

import pytest
import torch

from diloco_common.errors import ConfigError
from diloco_common.settings import ModelSettings, TrainSettings
from diloco_demo.checkpoint import TrainingProgress, load_checkpoint, save_checkpoint
from diloco_demo.data import TokenStream
from diloco_demo.gpt import build_gpt
from diloco_demo.training import Saver, choose_device, make_optimizer, train
from diloco_worker.view import LearnerState

MODEL = ModelSettings(layers=1, heads=2, width=32, context=16)
TRAIN = TrainSettings(batch=4, lr=1e-2, warmup=0.1)
TEXT = torch.tensor(list(b"the quick brown fox jumps over the lazy dog; " * 40), dtype=torch.uint8)
TOKENS_PER_STEP = 4 * 16


class Alone:
    """A synchroniser without a network: everything counts as merged at once, until the budget is reached."""

    def __init__(self, stop_after: int, budget: int = 0, merged: int = 0) -> None:
        self.budget = budget
        self.tokens_merged = merged
        self.losses: list[torch.Tensor] = []
        self._stop_after = stop_after

    def step(self, tokens, loss=None):
        self.tokens_merged += tokens
        self.losses.append(loss)

    @property
    def done(self):
        return len(self.losses) >= self._stop_after

    @property
    def fraction(self):
        return min(self.tokens_merged / self.budget, 1.0) if self.budget else 0.0


def parts(seed=0):
    model = build_gpt(MODEL, seed=seed)
    stream = TokenStream(TEXT, learner_id="a", seed=0, context=MODEL.context, batch=TRAIN.batch)
    return model, make_optimizer(model, TRAIN), stream


def run(steps, model, optimizer, stream, *, merged=0, **options):
    synchroniser = Alone(steps, budget=20 * TOKENS_PER_STEP, merged=merged)
    progress = train(synchroniser, model, optimizer, stream, TRAIN, budget=synchroniser.budget, **options)
    return synchroniser, progress


def test_ten_steps_are_five_a_checkpoint_and_five(tmp_path):
    torch.set_num_threads(1)
    whole = parts()
    _, at_ten = run(10, *whole)

    model, optimizer, stream = parts()
    half, at_five = run(5, model, optimizer, stream)
    learner = LearnerState("r", "a", 0, at_five.inner_step, at_five.tokens, 0).as_dict()
    save_checkpoint(tmp_path / "c", model, optimizer, learner, at_five.data_position)

    again, optimizer, stream = parts(seed=99)
    again.load_state_dict(model.state_dict())  # the weights come from the shards
    saved = load_checkpoint(tmp_path / "c", again, optimizer, run_id="r")
    assert saved.learner == learner
    progress = saved.progress
    assert progress == at_five == TrainingProgress(5, 5 * TOKENS_PER_STEP, 5 * TRAIN.batch)
    _, resumed = run(5, again, optimizer, stream, merged=half.tokens_merged, progress=progress)

    assert resumed == at_ten
    for name, value in whole[0].state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_straggler_sleeps_for_what_is_left_of_a_step():
    naps = []
    times = iter([0.0, 0.25, 1.0, 3.5, 3.5, 4.25, 4.5])  # after the start: when a step waits, and ends
    run(3, *parts(), step_min_s=1.0, sleep=naps.append, clock=lambda: next(times))
    assert naps == [0.75, 0.25], "none after the second step: it took longer by itself"


def test_the_checkpoint_is_due_by_elapsed_time_and_at_the_end():
    saved = []
    now = 100.0

    def clock():
        return now

    def one_second_passes(step):
        nonlocal now
        now += 1.0

    saver = Saver(lambda progress: saved.append(progress.inner_step), every_s=3.0, clock=clock)
    run(8, *parts(), saver=saver, on_step=one_second_passes)
    assert saved == [3, 6, 8]


def test_a_disk_that_fails_does_not_stop_training(caplog):
    def full(progress):
        raise OSError(28, "No space left on device")

    _, progress = run(2, *parts(), saver=Saver(full, every_s=0.0, clock=lambda: 0.0))
    assert progress.inner_step == 2
    assert "inner_step=1" in caplog.text
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:99", "xpu:99"])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(ConfigError, match=f"'{name}', which torch cannot use here"):
        choose_device(name)
    assert choose_device("cpu").type == "cpu"
    assert (choose_device("auto").type == "cpu") is not getattr(torch, "accelerator", torch.cuda).is_available()
