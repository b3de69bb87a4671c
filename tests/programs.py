"""Programs that some tests need and not every machine has. A test without its program skips, and says so loudly."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parent.parent / ".cache"
_UNPACKED = {
    "prometheus": CACHE / "prometheus/usr/bin/prometheus",
    "promtool": CACHE / "prometheus/usr/bin/promtool",
    "amtool": CACHE / "prometheus/usr/bin/amtool",
    "kubectl": CACHE / "kubectl/kubectl",
}
"""Where .ci/run puts what the machine lacks."""


def find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(_UNPACKED.get(program, program))


def need(program: str, package: str) -> str:
    """The path of a program; skips the test without it. `package` says where it comes from."""
    found = find(program)
    if found is None:
        warnings.warn(f"NOT CHECKED: {program} is not installed ({package})", stacklevel=2)
        pytest.skip(f"{program} is not installed ({package})")
    return found


def promtool() -> str:
    return need("promtool", "Debian and Ubuntu: apt install prometheus")


def amtool() -> str:
    return need("amtool", "Debian and Ubuntu: apt install prometheus-alertmanager")


def kubectl() -> str:
    return need("kubectl", "the command line of Kubernetes; .ci/run gets it")
