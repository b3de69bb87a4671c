"""A unit test starts no process and listens nowhere."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from alone import alone
from diloco_common.codec import library
from waiting import DEADLINE_S


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    """Whoever changes their sources tests what is new: a C compiler is the one process that may run, before the first
    test."""
    if not isinstance(library.find(), Path):
        library.build()


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with alone() as tried:
        yield
    assert not tried, tried[0]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine: it has an event loop of its own, and a deadline."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    return True
