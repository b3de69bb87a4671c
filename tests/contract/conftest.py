"""Shards and callers for contract tests; everything ends with the test."""

from __future__ import annotations

import io
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from front import Front
from in_process import Clock, InProcessShard, LoopThread, settings_with
from training import Training

from certificates import Certificates
from diloco_common.observe.logs import TextFormatter
from diloco_common.settings import Settings
from diloco_worker.shell.process import Notice


@pytest.fixture(autouse=True)
def nobody_is_left_who_listens() -> Iterator[None]:
    """A learner that a test forgets would hear the SIGTERM of another test, in the same process, hours later."""
    yield
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, Notice) and not handler.is_over:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pytest.fail("a learner is left that listens for SIGTERM: close it")


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(tmp_path: Path) -> Certificates:
    """The authority of a run, and what it has issued."""
    return Certificates(tmp_path / "certs")


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
def front(loop: LoopThread) -> Iterator[Callable[..., Front]]:
    """Puts a front before a shard: front(shard), or front(shard, another kind of Front)."""
    started: list[Front] = []

    def start(shard: InProcessShard, kind: type[Front] = Front) -> Front:
        made = loop.look(lambda: kind(shard))
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
