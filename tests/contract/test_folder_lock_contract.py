"""What a shard that ends leaves of its data folder while the disk hangs or refuses (reliability.md 7 and 20)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from diloco_common.errors import InUse
from diloco_common.settings import Settings
from diloco_server.shell import keeper, server
from diloco_server.shell.server import ShardServer
from diloco_server.storage.filesystem import FolderLock
from diloco_server.storage.store import FileStore
from stores import MANIFEST, make_version
from waiting import DEADLINE_S, until_async


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("way", ["stop", "abandon"])
def test_a_folder_that_a_hanging_write_may_still_land_in_stays_locked(tmp_path, monkeypatch, way, hangs) -> None:
    """Else another process could take the folder, and the old write would land among its files."""
    monkeypatch.setattr(server, "LAST_WRITE_S", 0.1 if hangs else DEADLINE_S)
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


def test_a_shard_ends_quietly_while_its_disk_refuses(tmp_path, monkeypatch, caplog) -> None:
    """reliability.md 7: what waits for the disk is not announced, and learners push it again to the next life."""
    monkeypatch.setattr(keeper, "LONGEST_S", 0.02)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def run() -> None:
        shard = ShardServer(Settings.model_validate({"shard": {"data_dir": tmp_path, "listen": "127.0.0.1:0"}}))
        await shard.start()
        monkeypatch.setattr(FileStore, "save", refuse)
        shard.host.work.start(lambda: shard.host.keeper.keep(make_version(0), MANIFEST), "merge-0")
        jobs = list(shard.host.work._jobs)
        await until_async(lambda: shard.host.keeper.failing, "the disk to refuse")
        await shard.stop(drain_s=0.05)
        await asyncio.wait(jobs, timeout=120)

    asyncio.run(run())
    said = caplog.text
    assert "No space left" in said
    assert "job failed" not in said
