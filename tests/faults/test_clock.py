"""The wall clock jumps by a day under everybody: leases, rounds and waits go by the monotonic clock.

Not by libfaketime: as of 0.9.10 it breaks `time.sleep` of Python 3.11, which sleeps until a monotonic time.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import loudly
import pytest

import forks
from processes import LocalCluster, environment, until, versions

SOURCE = Path(__file__).with_name("wall_clock.c")
DAY_S = 86_400
CALM = {"run.tokens": 0, "lease.lease_s": 30, "sync.staleness_max": 1000}
"""A worker that gets no core for a while is neither evicted nor too stale: only the clock may do harm here."""


class WallClock:
    """Of every process that is started from now on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, off_s: int) -> None:
        """Seconds that it is wrong by."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("@l", off_s))


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WallClock:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        loudly.skip("a wall clock that jumps", "there is no C compiler (Debian package: gcc)")
    library = tmp_path / "wall_clock.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    made = WallClock(tmp_path / "clock")
    forks.get_ready()  # for who goes by the right time, here and later
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("WALL_CLOCK", str(tmp_path / "clock"))
    return made


def seconds_off() -> float:
    """What a new process takes for the time, less the time."""
    code = "import time; print(time.time())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    plain = environment() | {"LD_PRELOAD": ""}
    true = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain, check=True)
    return float(asked.stdout) - float(true.stdout)


def test_a_wall_clock_that_jumps_a_day_changes_nothing(clock: WallClock, tmp_path: Path) -> None:
    """Fault 19: a day ahead, then a day behind; nobody is evicted, rounds go on, and so does a shard that restarts.

    It jumps for who has an interpreter of its own.
    """
    with LocalCluster(tmp_path / "run", CALM, keeps=True, own_interpreter=True) as cluster:
        cluster.start(shards=1, workers=[])
        cluster.own_interpreter = False
        cluster.add_worker("ann").start()
        until(lambda: cluster.has_merged("ann"), "a contribution of ann")
        (shard,) = cluster.shards
        for off_s in (DAY_S, -DAY_S):
            clock.set(off_s)
            assert abs(seconds_off() - off_s) < DAY_S / 2, "else nothing is shown"
            before = versions(shard.status())
            until(lambda b=before: all(v > b[f] for f, v in versions(shard.status()).items()), "versions")  # type: ignore[misc]
            assert shard.status()["evictions"] == 0
        epoch = shard.status()["epoch"]
        shard.kill()
        shard.start()
        until(lambda: shard.status()["ready"], "the shard to serve")
        before = versions(shard.status())
        until(lambda: all(v > before[f] for f, v in versions(shard.status()).items()), "versions after the restart")

        status = shard.status()
        assert (status["epoch"], status["evictions"], status["rejected"]) == (epoch + 1, 0, {})
        assert all(worker.alive for worker in cluster.workers.values())
        assert "Traceback" not in shard.said() + "".join(w.said() for w in cluster.workers.values())
