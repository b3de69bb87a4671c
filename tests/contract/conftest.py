"""Shards and callers for contract tests; everything ends with the test."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from front import Front
from in_process import Clock, InProcessShard, LoopThread, settings_with
from training import Training

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
    """Starts a shard: serve(settings, clock). Without a clock it has its own, as in production."""
    started: list[InProcessShard] = []

    def start(settings: Settings | None = None, clock: Callable[[], float] | None = None) -> InProcessShard:
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


@pytest.fixture
def front(loop: LoopThread) -> Iterator[Callable[[InProcessShard], Front]]:
    """Puts a front before a shard: front(shard)."""
    started: list[Front] = []

    def start(shard: InProcessShard) -> Front:
        made = loop.look(lambda: Front(shard))
        loop.run(made.start())
        started.append(made)
        return made

    yield start
    for made in started:
        loop.run(made.stop())


@pytest.fixture
def train() -> Iterator[Callable[..., Training]]:
    """Joins a learner with a tiny model: train(addresses, learner_id, ...)."""
    learners: list[Training] = []

    def start(shards: str, learner_id: str = "a", **options: Any) -> Training:
        training = Training(shards, learner_id, **options)
        learners.append(training)
        return training

    yield start
    for training in learners:
        training.learner.close()
