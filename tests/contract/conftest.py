"""Shards and callers for contract tests; everything ends with the test."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator

import pytest
from in_process import Clock, InProcessShard, LoopThread, settings_with

from diloco_common.logs import TextFormatter
from diloco_common.settings import Settings


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def serve(loop: LoopThread) -> Iterator[Callable[..., InProcessShard]]:
    """Starts a shard: serve(settings, clock)."""
    started: list[InProcessShard] = []

    def start(settings: Settings | None = None, clock: Callable[[], float] = time.monotonic) -> InProcessShard:
        shard = InProcessShard(loop, settings or settings_with(), clock)
        started.append(shard)
        return shard.start()

    yield start
    for shard in started:
        shard.stop_soon()


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What the log writes, as a person would see it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter())
    logger = logging.getLogger("diloco")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)
