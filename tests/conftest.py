"""What all tests share: one compute thread per process, and property tests without deadlines."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from diloco_common.observe import logs
from waiting import DEADLINE_S

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


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background, and all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)

ON_SIGTERM = signal.getsignal(signal.SIGTERM)
"""Of this process, before any test."""


@pytest.fixture(autouse=True)
def sigterm_does_what_it_did() -> Iterator[None]:
    """Commands that a test runs in this process take the signal for themselves, and would keep it from later tests. So
    do those that a fixture of a module runs, before this one."""
    signal.signal(signal.SIGTERM, ON_SIGTERM)
    yield
    signal.signal(signal.SIGTERM, ON_SIGTERM)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A test in this process may configure our log. What that writes to is closed when the test ends, so it goes
    too. A later test would read "I/O operation on closed file" otherwise."""
    root, ours = logging.getLogger(), logging.getLogger("diloco")
    levels = root.level, ours.level
    yield
    for logger, level in zip((root, ours), levels, strict=True):
        logger.setLevel(level)
        for handler in [h for h in logger.handlers if isinstance(h, logs.Handler)]:
            logger.removeHandler(handler)
    logging.captureWarnings(False)


FIRST = ("test_e2e_chaos", "test_e2e_up", "e2e", "faults", "attacks", "zoo", "simulation", "fuzz", "contract")
"""Files and folders in this order, then the others: what takes long begins first, so that all workers end together."""


def pytest_collection_finish() -> None:
    """A full collection need not look at torch and all tests again and again: 0.2 s a time."""
    gc.collect()
    gc.freeze()


def _shares(item: pytest.Item) -> bool:
    """Whether a test has a fixture in common with others."""
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009 - pytest has no public name
    return any(fixture.scope in ("class", "module") for found in fixtures for fixture in found)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real processes are marked as such.

    For several workers (`make test`): the order, and tests that share a fixture or a mark `xdist_group` stay together.
    """
    for item in items:
        if item.path.parent.name in ("attacks", "e2e", "faults"):
            item.add_marker(pytest.mark.e2e)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return

    def place(item: pytest.Item) -> int:
        names = (item.path.stem, item.path.parent.name)
        return next((index for index, first in enumerate(FIRST) if first in names), len(FIRST))

    items.sort(key=place)
    for item in items:
        if item.get_closest_marker("xdist_group") is None and _shares(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        # xdist 3.8 says the group by `_nodeid`, which pytest 9.2 does not read any more: nothing would stay together.
        if hasattr(item, "_id") and (group := item.get_closest_marker("xdist_group")):
            item._id = type(item._id).parse(f"{item.nodeid}@{group.args[0]}")


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
