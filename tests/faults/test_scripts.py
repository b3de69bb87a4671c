"""The long runs that docs/reliability.md names are scripts, which begin without what pytest sets up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gate
@pytest.mark.parametrize("script", ["kill_shard.py", "kill_everything.py", "kill_rank.py"])
def test_a_script_begins_by_itself(script: str) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), "--help"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--times" in done.stdout
