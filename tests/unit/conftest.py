"""A unit test starts no process and listens nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from alone import alone
from diloco_common.codec import library


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    """Whoever changes their sources tests what is new: a C compiler is the one process that may run, before the first
    test."""
    if not isinstance(library.KERNELS.find(), Path):
        library.KERNELS.build()


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with alone() as tried:
        yield
    assert not tried, tried[0]
