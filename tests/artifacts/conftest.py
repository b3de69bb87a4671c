"""What tests of what is shipped share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pure(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, without kernels."""
    out = tmp_path_factory.mktemp("pure")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(repository)]
    pure = {**os.environ, "DILOCO_NATIVE": "0"}
    built = subprocess.run(command, capture_output=True, text=True, check=False, env=pure)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.iterdir()
    return path
