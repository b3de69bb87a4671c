"""What is read, what is held out, and each learner's own stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco_common.errors import EXIT_DATA, DataError
from diloco_demo.data import TokenStream, is_held_out, load_corpus


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
