"""One process per data folder (faults.md 20)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco_common.errors import DataError, InUse
from diloco_common.settings import Settings
from diloco_server.storage.filesystem import FolderLock
from diloco_server.storage.store import FileStore, MemoryStore, Store, open_store
from stores import LONG_AGO


def opened(folder: Path | None) -> tuple[Store, FolderLock | None]:
    settings = Settings.model_validate({"shard": {"data_dir": folder}})
    return open_store(settings, epoch_in_memory=7, first_epoch=LONG_AGO)


def test_the_second_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(InUse, match=rf"pid {os.getpid()}\): stop it, or .* \(shard.data_dir\)") as refused:
        FolderLock(tmp_path)
    assert refused.value.exit_code == 4
    lock.release()
    FolderLock(tmp_path).release()


def test_a_folder_that_is_in_use_is_not_touched(tmp_path: Path) -> None:
    store, lock = opened(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InUse):
        opened(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    assert isinstance(store, FileStore)
    lock.release()


def test_without_a_folder_versions_stay_in_memory() -> None:
    store, lock = opened(None)
    assert (type(store), store.epoch, lock) == (MemoryStore, 7, None)


def test_a_folder_that_cannot_be_used_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"shard.data_dir .*file/data cannot be used: Not a directory"):
        opened(tmp_path / "file" / "data")
