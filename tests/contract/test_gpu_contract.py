"""`make gpu` the whole way: the command, the process of a step, its file, the table, the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_step_runs_on_the_device_that_is_named_and_is_written_down(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu", "--device=cpu", "--minutes=2", "--only=doctor", f"--out={tmp_path}"]
    ended = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["machine"]["card"] == "none (a rehearsal on the CPU)"
    assert [case["state"] for case in found["cases"].values()] == ["done"] * 4
    assert "the same bits" in ended.stdout


def test_a_device_that_is_not_there_fails_in_every_case_and_ends_with_1(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu", "--device=xpu", "--minutes=2", "--only=doctor", f"--out={tmp_path}"]
    ended = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)

    assert ended.returncode == 1
    assert "FAIL" in ended.stdout
