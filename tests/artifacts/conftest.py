"""What tests of what is shipped share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tools.wheels import TOOLS


@pytest.fixture(scope="session")
def wheels(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The wheels of this checkout, without kernels, by the names of their distributions."""
    out = tmp_path_factory.mktemp("pure")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    pure = {**os.environ, "DILOCO_NATIVE": "0"}
    for folder in (repository, *(repository / name for name in TOOLS)):
        built = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False, env=pure)
        assert built.returncode == 0, built.stdout + built.stderr
    return {path.name.partition("-")[0].replace("_", "-"): path for path in out.iterdir()}


@pytest.fixture(scope="session")
def pure(wheels: Mapping[str, Path]) -> Path:
    """That of the node."""
    return wheels["decoupled-diloco"]
