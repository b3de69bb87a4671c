"""The demo: its loop learns, stops and goes on; its model, its data, and trackers that never hold it up."""

from __future__ import annotations

import csv
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from diloco_common.errors import EXIT_DATA, ConfigError, DataError
from diloco_common.settings import ModelSettings, TrainSettings
from diloco_demo.checkpoint import TrainingProgress, load_checkpoint, save_checkpoint
from diloco_demo.data import TokenStream, is_held_out, load_corpus
from diloco_demo.gpt import BYTES, build_gpt
from diloco_demo.tracking import WAITING_MAX, Tracker, open_tracker
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


TINY = ModelSettings(layers=2, heads=2, width=16, context=16)


def test_initial_values_are_a_function_of_the_seed_and_leave_torchs_random_state_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build_gpt(TINY, seed=7)
    assert torch.equal(torch.get_rng_state(), before)

    torch.manual_seed(2)
    same, other = build_gpt(TINY, seed=7), build_gpt(TINY, seed=8)
    for name, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[name]), name
        assert not torch.equal(value, other.state_dict()[name]), name


def test_a_position_sees_itself_and_the_past_but_not_the_future():
    model = build_gpt(TINY, seed=0)
    text = torch.randint(BYTES, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 9] ^= 1
    moved = (model(text) - model(changed)).abs().amax(dim=-1)[0]
    assert moved[:9].max() == 0
    assert moved[9:].min() > 0


class Kept:
    """A sink that keeps what it is given, once it may."""

    def __init__(self) -> None:
        self.points: list[tuple[int, Mapping[str, float]]] = []
        self.may_write = threading.Event()
        self.closed = False

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self.may_write.wait(30)
        self.points.append((step, figures))

    def close(self) -> None:
        self.closed = True


def test_a_sink_that_hangs_costs_points_and_no_time(caplog: pytest.LogCaptureFixture) -> None:
    sink = Kept()
    tracker = Tracker(lambda: sink)
    for step in range(WAITING_MAX + 100):
        tracker.log(step, {"loss": 1.0})
    assert 98 <= tracker.dropped <= 100
    tracker.close(timeout_s=0.0)
    sink.may_write.set()
    assert "its last points are lost" in caplog.text


def test_a_csv_file_of_several_learners_has_one_head(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.csv"
    for name in ("a", "b"):
        tracker = open_tracker(f"csv:{path}", run="r", name=name)
        tracker.log(7, {"loss": 1.5, "tokens": 20})
        tracker.close()
    rows = list(csv.DictReader(path.open()))
    assert [(row["run"], row["name"], row["step"], row["loss"], row["fraction"]) for row in rows] == [
        ("r", "a", "7", "1.5", ""), ("r", "b", "7", "1.5", ""),
    ]  # fmt: skip
    assert not path.stat().st_mode & 0o111


def stream(text, learner_id="a", seed=0, context=8, batch=4, position=0):
    return TokenStream(text, learner_id=learner_id, seed=seed, context=context, batch=batch, position=position)


def numbered(n):
    """Text whose every byte tells its place (n up to 256)."""
    return torch.arange(n, dtype=torch.uint8)


def write_files(root: Path, count: int, size: int = 64) -> None:
    """Files filled with one byte each, so that a byte says which file it is from."""
    for i in range(count):
        path = root / f"sub{i % 3}" / f"{i:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i]) * size)


def test_files_are_held_out_by_a_hash_of_their_name(tmp_path):
    write_files(tmp_path, 60)
    corpus = load_corpus(str(tmp_path), held_out=0.2)
    held = {i for i in range(60) if is_held_out(f"sub{i % 3}/{i:03d}.txt", 0.2)}
    assert set(corpus.held_out.tolist()) == held
    assert set(corpus.train.tolist()) == set(range(60)) - held
    assert (corpus.files, corpus.train.dtype) == (60, torch.uint8)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: None, "there is no file or folder"),
        (lambda root: root.mkdir(), "no readable file"),
        (lambda root: root.write_bytes(b"x" * 79), "holds 79 bytes"),
    ],
    ids=["missing", "empty folder", "small file"],
)
def test_bad_data_is_refused_with_its_path(tmp_path, make, says):
    source = tmp_path / "data"
    make(source)
    with pytest.raises(DataError, match=says) as caught:
        load_corpus(str(source), held_out=0.05)
    assert str(source) in str(caught.value)
    assert caught.value.exit_code == EXIT_DATA


def test_a_stream_visits_every_window_once_in_a_pass():
    text = numbered(8 * 25 + 8)
    a = stream(text, batch=5)
    inputs, targets = (torch.cat(parts) for parts in zip(*(a.next_batch() for _ in range(5)), strict=True))
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((25, 8), torch.int64, torch.int64)
    assert torch.equal(targets, inputs + 1), "the inputs one byte on"
    flat = inputs.flatten().tolist()
    assert len(set(flat)) == len(flat) == 200


def test_streams_differ_by_learner_seed_and_pass():
    text = numbered(208)
    orders = {
        tuple(torch.cat([s.next_batch()[0] for _ in range(5)]).flatten().tolist())
        for s in [
            stream(text, batch=5),
            stream(text, batch=5, learner_id="b"),
            stream(text, batch=5, seed=1),
            stream(text, batch=5, position=25),
        ]
    }
    assert len(orders) == 4
