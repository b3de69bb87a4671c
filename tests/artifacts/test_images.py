"""tools/images.py: which images of others are tags."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tools.images import FILES

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_not_pinned_is_named_and_no_failure(tmp_path: Path) -> None:
    for file in ("tools/images.py", *FILES):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "deploy/Dockerfile").write_text("ARG BASE_IMAGE=python:3.11-slim\n")
    command = [sys.executable, tmp_path / "tools/images.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 0
    assert "NOT PINNED: python:3.11-slim is a tag" in ended.stdout
