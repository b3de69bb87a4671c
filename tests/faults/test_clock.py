"""The wall clock jumps by a day under everybody: leases, rounds and waits go by the monotonic clock."""

from __future__ import annotations

from pathlib import Path

import loudly
import pytest
from processes import LocalCluster, until, versions

LIBRARIES = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1")


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that says how far off the wall clock of every process is that starts from now on."""
    found = [path for pattern in LIBRARIES for path in Path("/").glob(pattern.lstrip("/"))]
    if not found:
        loudly.skip("a wall clock that jumps", "libfaketime is not installed (Debian package: faketime)")
    file = tmp_path / "clock"
    file.write_text("+0")
    monkeypatch.setenv("LD_PRELOAD", str(found[0]))
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(file))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    return file


def test_a_wall_clock_that_jumps_a_day_changes_nothing(clock: Path, tmp_path: Path) -> None:
    """Fault 19: a day ahead, then a day behind; nobody is evicted, rounds go on, and so does a shard that restarts."""
    with LocalCluster(tmp_path / "run", {"run.tokens": 0}, keeps=True) as cluster:
        cluster.start(shards=1, workers=["ann", "ben"])
        (shard,) = cluster.shards
        for days in ("+1d", "-1d"):
            clock.write_text(days)
            before = versions(shard.status())
            until(lambda b=before: all(v > b[f] + 2 for f, v in versions(shard.status()).items()), "versions")  # type: ignore[misc]
        shard.kill()
        shard.start()
        until(lambda: shard.status()["ready"], "the shard to serve")
        before = versions(shard.status())
        until(lambda: all(v > before[f] for f, v in versions(shard.status()).items()), "versions after the restart")

        status = shard.status()
        assert (status["epoch"], status["evictions"], status["rejected"]) == (2, 0, {})
        assert all(worker.alive for worker in cluster.workers.values())
        assert "Traceback" not in shard.said() + "".join(w.said() for w in cluster.workers.values())
