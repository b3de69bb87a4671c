"""What a shard or a worker writes is for its owner alone, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diloco_demo.checkpoint import save_checkpoint
from diloco_deploy.checkpoint.folders import take_checkpoint
from diloco_server.storage import folders
from diloco_server.storage.filesystem import Disk, FolderLock
from diloco_worker.global_model import write_model
from stores import MANIFEST, make_version, open_store


@pytest.fixture(params=[0o000, 0o077], ids=lambda mask: f"umask {mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def everything_in(folder: Path) -> dict[str, int]:
    """Mode of each file and folder, this one included."""
    return {str(path.relative_to(folder)): mode(path) for path in (folder, *folder.rglob("*"))}


def fill(folder: Path) -> None:
    """A data folder with versions of the whole model, and a shard that holds it."""
    store = open_store(Disk(folder))
    store.recover()
    lock = FolderLock(folder)
    for fragment_id in (0, 1):
        store.save(make_version(0, fragment_id=fragment_id), MANIFEST)
    lock.release()


@pytest.mark.usefixtures("umask")
def test_a_data_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    fill(tmp_path / "new/shard-0")
    found = everything_in(tmp_path / "new")
    assert {found.pop("."), found.pop("shard-0")} == {0o700}
    assert len(found) >= 4
    assert set(found.values()) == {0o600}, found


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("hard_links", [True, False], ids=["linked", "copied"])
def test_a_checkpoint_is_for_its_owner_alone(tmp_path: Path, hard_links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "shard-0")
    if not hard_links:

        def no_link(_: Path, target: Path) -> None:
            raise OSError(folders.errno.EXDEV, "another disk", target)

        monkeypatch.setattr(folders.os, "link", no_link)
    take_checkpoint([tmp_path / "shard-0"], tmp_path / "checkpoints/c", whole=True)
    found = everything_in(tmp_path / "checkpoints")
    assert {found.pop("."), found.pop("c")} == {0o700}
    assert set(found.values()) == {0o600}, found


@pytest.mark.usefixtures("umask")
def test_a_file_that_others_could_read_is_closed_to_them_when_it_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"of an earlier release")
    (tmp_path / "old").chmod(0o644)
    Disk(tmp_path).create("old").close()
    assert mode(tmp_path / "old") == 0o600


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)  # a volume of Kubernetes belongs to root, and we are in its group
    Disk(tmp_path)
    assert mode(tmp_path) == 0o770


@pytest.mark.usefixtures("umask")
def test_a_checkpoint_of_a_learner_is_for_its_owner_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = tmp_path / "checkpoint"
    save_checkpoint(path, model, torch.optim.AdamW(model.parameters()), {"run": "run"}, 0)
    assert mode(path) == 0o600


def test_an_exported_model_is_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    write_model(tmp_path / "model.safetensors", {"weight": torch.zeros(3)})
    assert mode(tmp_path / "model.safetensors") == 0o666 & ~umask
