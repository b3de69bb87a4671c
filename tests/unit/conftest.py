"""A unit test starts no process and listens nowhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from alone import alone
from diloco_common.codec import native


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    """A C compiler is the one process that may run, and does so before the first test."""
    native.find()


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with alone() as tried:
        yield
    assert not tried, tried[0]
