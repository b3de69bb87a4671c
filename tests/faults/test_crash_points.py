"""Every fsync and every rename of the store as a crash point, on a real disk, by strace (faults.md 5, P2, P5)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from diloco_server.storage.filesystem import Disk
from stores import assert_equal, make_version, open_store

HERE = Path(__file__).parent
WRITER = HERE / "write_versions.py"
CALLS = {"fsync": 8, "rename": 3}
"""System call -> how many the writer makes: two fsyncs for its epoch and for each of three versions."""


def traced(folder: Path, *inject: str) -> subprocess.CompletedProcess[str]:
    """Run the writer under strace."""
    command = ["strace", "-f", "-qq", "-e", "trace=fsync,rename", *inject, sys.executable, str(WRITER), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module", autouse=True)
def strace_works(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips, loudly, where processes cannot be traced; else shows that the writer makes the calls that are tried."""
    if shutil.which("strace") is None:
        warnings.warn("strace is not installed: crash points were NOT tried on a real disk", stacklevel=1)
        pytest.skip("strace is not installed (Debian package: strace)")
    run = traced(tmp_path_factory.mktemp("whole"))
    if "ptrace" in run.stderr.lower() and run.returncode:
        warnings.warn("strace may not trace here: crash points were NOT tried on a real disk", stacklevel=1)
        pytest.skip(f"strace may not trace here: {run.stderr[-200:]}")
    assert run.stdout.split() == ["0", "1", "2"], run.stderr
    assert {call: run.stderr.count(f"{call}(") for call in CALLS} == CALLS


@pytest.mark.parametrize(("call", "at"), [(call, at) for call, count in CALLS.items() for at in range(1, count + 1)])
def test_a_process_killed_in_a_system_call_leaves_what_it_announced(call: str, at: int, tmp_path: Path) -> None:
    run = traced(tmp_path, "-e", f"inject={call}:signal=KILL:when={at}")
    assert run.returncode not in (0, 1), "it was to be killed"
    announced = [int(line) for line in run.stdout.split()]

    recovered = open_store(Disk(tmp_path)).recover()

    assert recovered.damage == []
    if not recovered.versions:
        assert announced == []
        return
    (found,) = recovered.versions
    assert found.stored.record.version in ([announced[-1], announced[-1] + 1] if announced else [0])
    assert_equal(found.stored, make_version(found.stored.record.version))
    assert not found.is_behind
