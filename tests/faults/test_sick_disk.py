"""A disk that refuses or is slow under a running shard, by strace in its system calls, or that is full: a small tmpfs,
which needs root."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import loudly
import pytest
from steady import SteadyCluster

from processes import Shard, http_get, until, versions

SIZE = 4 * 2**20
"""Bytes of a small disk."""
SLOW_S = 8
"""Longer than the silence after which a learner would connect again, 2.5 heartbeats."""
LEASES = {"lease.lease_s": 15, "lease.heartbeat_s": 3}


@contextmanager
def injected(shard: Shard, log: Path, call: str, fault: str) -> Iterator[Callable[[], None]]:
    """While this lasts, a system call of the shard's does not do what it should; as `filled`."""
    loudly.need("a sick disk", strace="strace")
    command = ["strace", "-f", "-qq", "-p", str(shard.pid), "-o", str(log), "-e", f"trace={call}"]
    command += ["-e", f"inject={call}:{fault}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        try:
            until(lambda: has_ended(tracer) or has_injected(log), f"a {call} that is not as usual")
            if has_ended(tracer):
                loudly.skip("a sick disk", f"strace may not trace here: {tracer.communicate()[1]}")
            yield lambda: None
        finally:
            tracer.send_signal(signal.SIGINT)  # it lets go of the shard
            tracer.wait()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        loudly.skip("a full disk", f"no tmpfs can be mounted here (root can): {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def filled(folder: Path) -> Iterator[Callable[[], None]]:
    """While this lasts, there is no space, but what a version left that did not fit; the function takes that, too."""
    ballast = folder / "ballast"

    def fill() -> None:
        with ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(2**12))

    fill()
    yield fill
    ballast.unlink()


def has_ended(tracer: subprocess.Popen[str]) -> bool:
    return tracer.poll() is not None


def has_injected(log: Path) -> bool:
    return log.exists() and re.search("INJECTED|DELAYED", log.read_text()) is not None


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ("fsync", "EIO", "Errno 5"),
        pytest.param("rename", "EROFS", "Errno 30", marks=pytest.mark.gate),
        ("write", "ENOSPC", "Errno 28"),
    ],
)
def test_a_disk_that_refuses_stops_versions_and_nothing_else(call: str, error: str, words: str, tmp_path: Path) -> None:
    """Fault 7: not ready, nothing announced, the old state intact; goes on when the disk works again."""
    data, is_full = tmp_path / "shard-0", error == "ENOSPC"
    with small_disk(data) if is_full else nullcontext(), SteadyCluster(tmp_path) as cluster:
        cluster.add("ann")
        (shard,), ann = cluster.shards, cluster.learners["ann"]
        with filled(data) if is_full else injected(shard, tmp_path / "strace", call, f"error={error}") as fill:
            until(lambda: http_get(shard.endpoints.http, "/readyz")[0] == 503, "the shard to be not ready")
            reason = http_get(shard.endpoints.http, "/readyz")[1]
            assert "storage" in reason
            assert words in reason
            assert "version not durable, so not announced" in shard.said()
            until(
                lambda: fill() or all(not f["round_open"] for f in shard.status()["fragments"]),
                "every fragment to wait",
            )
            stuck, steps = versions(shard.status()), ann.ask().steps
            until(lambda: ann.ask().steps > steps + 20, "steps without versions")
            assert versions(shard.status()) == stuck

        until(lambda: shard.ready, "the shard to be ready again")
        until(lambda: min(versions(shard.status()).values()) > max(stuck.values()), "versions")
        assert cluster.disagreements() == []
        assert "storage works again" in cluster.said()
        assert "Traceback" not in cluster.said()


@pytest.mark.gate
def test_a_slow_disk_slows_versions_down_and_nobody_else(tmp_path: Path) -> None:
    """Fault 7: every fsync takes eight seconds; the shard answers, heartbeats are in time, and learners step."""
    with SteadyCluster(tmp_path, LEASES) as cluster:
        cluster.add("ann")
        (shard,), ann = cluster.shards, cluster.learners["ann"]
        with injected(shard, tmp_path / "strace", "fsync", f"delay_enter={SLOW_S}s"):
            before, steps = versions(shard.status()), ann.ask().steps
            until(lambda: all(v > before[f] for f, v in versions(shard.status()).items()), "a version of each fragment")
            assert shard.ready
            assert ann.ask().steps > steps
        assert shard.status()["evictions"] == 0
        assert ann.ask().reconnects == 0
        assert cluster.disagreements() == []
