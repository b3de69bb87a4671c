"""One process per data folder (faults.md 20)."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco_common.errors import DataError, InUse
from diloco_common.settings import Settings
from diloco_server import keeper, server
from diloco_server.server import ShardServer
from diloco_server.storage.folder import open_store
from diloco_server.storage.lock import FolderLock
from diloco_server.storage.store import FileStore, MemoryStore, Store
from stores import LONG_AGO, MANIFEST, make_version


def settings_for(folder: Path | None) -> Settings:
    return Settings.model_validate({"shard": {"data_dir": folder}})


def opened(settings: Settings) -> tuple[Store, FolderLock | None]:
    return open_store(settings, epoch_in_memory=7, first_epoch=LONG_AGO)


def test_the_second_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(InUse, match=rf"pid {os.getpid()}\): stop it, or .* \(shard.data_dir\)") as refused:
        FolderLock(tmp_path)
    assert refused.value.exit_code == 4
    lock.release()
    FolderLock(tmp_path).release()


def test_a_folder_that_is_in_use_is_not_touched(tmp_path: Path) -> None:
    store, lock = opened(settings_for(tmp_path))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InUse):
        opened(settings_for(tmp_path))
    assert sorted(tmp_path.iterdir()) == before
    assert isinstance(store, FileStore)
    assert lock is not None
    lock.release()


def test_the_next_one_has_the_next_epoch(tmp_path: Path) -> None:
    for epoch in (LONG_AGO, LONG_AGO + 1, LONG_AGO + 2):
        store, lock = opened(settings_for(tmp_path / "new" / "folder"))
        assert store.epoch == epoch
        assert lock is not None
        lock.release()


def test_without_a_folder_versions_stay_in_memory() -> None:
    store, lock = opened(settings_for(None))
    assert isinstance(store, MemoryStore)
    assert store.epoch == 7
    assert lock is None


def test_a_folder_that_cannot_be_used_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"shard.data_dir .*file/data cannot be used: Not a directory"):
        opened(settings_for(tmp_path / "file" / "data"))


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("way", ["stop", "abandon"])
def test_a_folder_that_a_hanging_write_may_still_land_in_stays_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, hangs: bool
) -> None:
    """Else another process could take the folder, and the old write would land among its files."""
    monkeypatch.setattr(server, "WRITES_END_S", 0.1)
    begun, gate = threading.Event(), threading.Event()
    save = FileStore.save

    def slow_save(*args: Any) -> int:
        begun.set()
        assert gate.wait(20.0)
        return save(*args)

    monkeypatch.setattr(FileStore, "save", slow_save)

    async def run() -> None:
        shard = ShardServer(Settings.model_validate({"shard": {"data_dir": tmp_path, "listen": "127.0.0.1:0"}}))
        await shard.start()
        keeping = asyncio.create_task(shard.host.keeper.keep(make_version(0), MANIFEST))
        await asyncio.to_thread(begun.wait, 20.0)
        if not hangs:
            gate.set()
        await getattr(shard, way)()
        keeping.cancel()

    asyncio.run(run())
    if hangs:
        with pytest.raises(InUse):
            FolderLock(tmp_path)
    else:
        FolderLock(tmp_path).release()
    gate.set()


def test_a_shard_ends_quietly_while_its_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """faults.md 7: what waits for the disk is not announced, and learners push it again to the next life."""
    monkeypatch.setattr(server, "DRAIN_S", 0.05)
    monkeypatch.setattr(keeper, "RETRY_S", 0.02)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def run() -> None:
        shard = ShardServer(Settings.model_validate({"shard": {"data_dir": tmp_path, "listen": "127.0.0.1:0"}}))
        await shard.start()
        monkeypatch.setattr(FileStore, "save", refuse)
        shard.host.start(lambda: shard.host.keeper.keep(make_version(0), MANIFEST), "merge-0")
        jobs = list(shard.host._jobs)
        await shard.stop()
        await asyncio.wait(jobs, timeout=20.0)

    asyncio.run(run())
    said = caplog.text
    assert "No space left" in said
    assert "job failed" not in said
