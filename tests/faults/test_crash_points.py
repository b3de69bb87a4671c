"""Every fsync and every rename of the store as a crash point, on a real disk, by strace (reliability.md 5, P2, P5)."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import loudly
import pytest

from diloco_server.storage.filesystem import Disk
from forks import Forked
from processes import until
from stores import assert_equal, make_version, open_store

CALLS = {"fsync": 8, "rename": 3}
"""System call -> how many the writer makes: two fsyncs for its epoch and for each of three versions."""

ANSWER_S = 60.0
"""Of a writer that takes a second."""


@dataclass(frozen=True)
class Traced:
    """How the writer ended, what it said, and its calls; `refused` says why it could not be traced."""

    exit_code: int
    announced: list[int]
    calls: str
    refused: str = ""


def traced(folder: Path, *inject: str) -> Traced:
    """Run the writer (write_versions.py) on `folder`/data under strace, which begins once all is imported."""
    (folder / "data").mkdir()
    log, calls = folder / "log", folder / "strace"
    writer = Forked("write_versions", [str(folder)], log, os.environ)
    command = ["strace", "-f", "-p", str(writer.pid), "-o", str(calls), "-e", "trace=fsync,rename", *inject]
    try:
        until(lambda: log.exists() and "ready" in log.read_text(), "the writer to be ready")
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        first = tracer.stderr.readline()
        if "attached" in first:
            (folder / "go").touch()
            writer.wait(ANSWER_S)
    finally:
        writer.kill()  # and the tracer ends with it
    _, said = tracer.communicate(timeout=ANSWER_S)
    if "attached" not in first:
        return Traced(0, [], "", first + said)
    return Traced(writer.wait(), [int(line) for line in log.read_text().split()[1:]], calls.read_text())


@pytest.fixture(scope="module", autouse=True)
def strace_works(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips, loudly, where processes cannot be traced; else shows that the writer makes the calls that are tried."""
    loudly.need("crash points on a real disk", strace="strace")
    run = traced(tmp_path_factory.mktemp("whole"))
    if run.refused:
        loudly.skip("crash points on a real disk", f"strace may not trace here: {run.refused[-200:]}")
    assert (run.exit_code, run.announced) == (0, [0, 1, 2])
    assert {call: run.calls.count(f"{call}(") for call in CALLS} == CALLS


@pytest.mark.parametrize(("call", "at"), [(call, at) for call, count in CALLS.items() for at in range(1, count + 1)])
def test_a_process_killed_in_a_system_call_leaves_what_it_announced(call: str, at: int, tmp_path: Path) -> None:
    run = traced(tmp_path, "-e", f"inject={call}:signal=KILL:when={at}")
    assert run.exit_code == -signal.SIGKILL
    announced = run.announced

    recovered = open_store(Disk(tmp_path / "data")).recover()

    assert recovered.damage == []
    if not recovered.versions:
        assert announced == []
        return
    (found,) = recovered.versions
    assert found.stored.record.version in ([announced[-1], announced[-1] + 1] if announced else [0])
    assert_equal(found.stored, make_version(found.stored.record.version))
    assert not found.is_behind
