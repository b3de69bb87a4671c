"""What all tests share: one compute thread per process, and property tests without deadlines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch starts, here and in every process that a test starts: OpenMP threads of several processes on a
# few busy cores spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The machine may be busy, so nothing is judged by its speed. CI tries the same examples every time.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
