"""A disk that fills up under a running shard, and has room again (Fault 7, ENOSPC). Needs root, for a small tmpfs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import loudly
import pytest

from processes import LocalCluster, http_get, until, versions

SIZE = 4 * 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "run"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        loudly.skip("a full disk", f"no tmpfs can be mounted here (root can): {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_versions_but_nobody_and_goes_on_when_there_is_space(
    small_disk: Path, tmp_path: Path
) -> None:
    settings = {"run.tokens": 0, "shard.data_dir": small_disk / "data"}
    with LocalCluster(tmp_path / "cluster", settings) as cluster:
        cluster.start(shards=1, workers=["ann"])
        (shard,), worker = cluster.shards, cluster.workers["ann"]
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**12))
        until(lambda: http_get(shard.endpoints.http, "/readyz")[0] == 503, "the shard to be not ready")
        assert "storage: [Errno 28]" in http_get(shard.endpoints.http, "/readyz")[1]
        assert "version not durable, so not announced" in shard.said()

        until(lambda: all(f["round_open"] is False for f in shard.status()["fragments"]), "every fragment to wait")
        stuck, step = versions(shard.status()), worker.status()["inner_step"]
        until(lambda: worker.status()["inner_step"] > step + 10, "steps without versions")
        assert versions(shard.status()) == stuck, "nothing is announced that is not durable"

        ballast.unlink()
        until(lambda: http_get(shard.endpoints.http, "/readyz")[0] == 200, "the shard to be ready")
        until(lambda: min(versions(shard.status()).values()) > max(stuck.values()), "versions")
        assert "storage works again" in shard.said()
