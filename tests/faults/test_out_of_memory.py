"""A worker that the kernel kills for lack of memory: `diloco up` says so, and starts it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import loudly
import psutil
import pytest

from processes import TINY, environment, sets, until

LIMIT = 2**24
"""Bytes that a worker may still take once it is in its group: less than Python and torch need."""
WHAT = "a worker without memory"


@pytest.fixture
def tight() -> Iterator[Path]:
    """A control group, of version 2 or 1, whose processes get next to no memory."""
    name = f"diloco-{os.getpid()}"
    for root, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(root, name)
        try:
            group.mkdir()
            with (group / limit).open("r+") as file:  # there only if the folder is a group that may limit memory
                file.write(str(LIMIT))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        yield group
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        until(lambda group=group: not (group / "cgroup.procs").read_text(), "the group to be empty")  # type: ignore[misc]
        group.rmdir()
        return
    loudly.skip(WHAT, "no control group with a memory limit can be made here (root can)")


@pytest.mark.gate
def test_a_worker_that_ran_out_of_memory_is_named_and_started_again(tight: Path, tmp_path: Path) -> None:
    """Fault 18: as SIGKILL, and what `diloco up` shows says so."""
    folder = tmp_path / "run"
    flags = ["--shards=1", "--workers=2", "--tokens=100_000", f"--folder={folder}"]
    command = [sys.executable, "-m", "diloco_deploy", "up", *flags, *sets(TINY)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, text=True, env=environment()) as up:
        try:
            first = until(lambda: worker_of(up), "worker-1 to start")
            (tight / "cgroup.procs").write_text(str(first.pid))
            until(lambda: (now := worker_of(up)) and now.pid != first.pid, "worker-1 to be killed and started again")
            said, _ = up.communicate(timeout=200)
        finally:
            up.kill()
    assert up.returncode == 0, said
    assert "worker-1 died (signal 9: the machine or its container ran out of memory)" in said
    assert "Traceback" not in said


def worker_of(up: subprocess.Popen[str]) -> psutil.Process | None:
    for child in psutil.Process(up.pid).children():
        with suppress(psutil.NoSuchProcess):
            if any("worker-1" in argument for argument in child.cmdline()):
                return child
    return None
