"""benchmarks/versus.py from the command line: two systems for a few seconds, on machines behind thin links."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import loudly
import pytest
from networks import need_namespaces

VERSUS = Path(__file__).resolve().parents[2] / "benchmarks" / "versus.py"
LIMIT_S = 900.0


@pytest.mark.gate
@pytest.mark.timeout(LIMIT_S + 100)
def test_two_systems_are_compared_and_leave_nothing_behind(tmp_path: Path) -> None:
    need_namespaces("versus.py")
    loudly.need("versus.py", nsenter="util-linux", unshare="util-linux")
    results = tmp_path / "versus.jsonl"
    before = traces()

    ended = subprocess.run(
        [
            sys.executable, str(VERSUS), "--only=ours,ddp", "--links=100mbit", "--cases=plain", "--seconds=6",
            f"--results={results}", "--no-page",
        ],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stdout + ended.stderr
    ours, ddp = (json.loads(line) for line in results.read_text().splitlines())
    assert (ours["system"], ddp["system"]) == ("ours", "ddp")
    for found in (ours, ddp):
        assert "failed" not in found, found
    assert ours["trained_per_s"] > 0
    assert ours["losses"][0][1] > ours["losses"][-1][1]
    assert ours["bytes_per_token"] > 0
    if ddp["trained_per_s"] > 0:  # on a busy machine it may not end a single step
        assert ours["bytes_per_token"] < ddp["bytes_per_token"] / 10
    assert traces() == before


def traces() -> set[str]:
    """Names of what versus.py makes, on this machine now."""
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return {name for name in (*namespaces, *(path.name for path in Path("/dev/shm").iterdir())) if name[:6] == "versus"}
