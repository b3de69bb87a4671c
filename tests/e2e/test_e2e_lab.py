"""`diloco lab` in processes of its own: whoever stops it stops all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ARM = """
[run]
tokens = 100000000
[model]
layers = 1
heads = 1
width = 16
context = 16
[lab]
learners = 2
"""


def test_runs_at_once_end_with_the_command_that_began_them(tmp_path: Path) -> None:
    (tmp_path / "arm.toml").write_text(ARM)
    compare = ["lab", "compare", "arm.toml", "--jobs", "2", "--out", "results.jsonl"]
    command = [sys.executable, "-m", "diloco_common.child", str(os.getpid()), "diloco_deploy", *compare]
    with subprocess.Popen(command, cwd=tmp_path) as lab:
        try:
            runs = until(lambda: both_run(spawned_by(lab.pid)), "both runs to begin")
        finally:
            lab.kill()
        until(lambda: not any(is_alive(run) for run in runs), "both runs to end")


def spawned_by(pid: int) -> list[int]:
    """Its children that run something, without the one that tracks resources."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def both_run(pids: list[int]) -> list[int]:
    """These, once there are two that have loaded torch: they have been told by then to end with their parent."""
    ready = [pid for pid in pids if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]
    return ready if len(ready) == 2 else []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
