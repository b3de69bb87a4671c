"""What the peers' scripts (peer_*.py) share: options, learner processes that start each round together, and the answer.

Each script runs under the Python in which its peer is installed, so nothing here knows this project, and the standard
library is all it needs. A script prints its answer, one line of JSON, last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import queue
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TENSORS = 10
"""Equal tensors that the parameters are spread over."""
SYNC_S = 300.0
"""Longest wait for the other learners."""


@dataclass(frozen=True)
class Options:
    params: int
    learners: int
    rounds: int

    @property
    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        bounds = [self.params * i // TENSORS for i in range(TENSORS + 1)]
        return [b - a for a, b in itertools.pairwise(bounds)]


def read_options() -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--params", type=lambda text: int(float(text)), required=True)
    parser.add_argument("--learners", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True, help="measured, after one that is not")
    return Options(**vars(parser.parse_args()))


class Rounds:
    """Lets a learner time its rounds, each begun together with all others."""

    def __init__(self, barrier: Any) -> None:
        self.seconds: list[float] = []
        self._barrier = barrier

    def time(self, work: Callable[[], None]) -> None:
        self._barrier.wait(SYNC_S)
        began = time.perf_counter()
        work()
        self.seconds.append(time.perf_counter() - began)


def run_learners(learner: Callable[[int, Options, Rounds, Any], None], options: Options, shared: Any) -> list[float]:
    """Run `learner(rank, options, rounds, shared)` in a spawned process each; seconds of each round: the last one's.

    The first round is left out: connections are made in it. Raises RuntimeError if a learner fails.
    """
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(options.learners), context.Queue()
    processes = [
        context.Process(target=_learner, args=(learner, rank, options, barrier, shared, answers))
        for rank in range(options.learners)
    ]
    for process in processes:
        process.start()
    try:
        seconds = [_next_answer(answers, processes) for _ in processes]
    finally:
        barrier.abort()
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
    return [max(each) for each in zip(*seconds, strict=True)][1:]


def _learner(
    learner: Callable[[int, Options, Rounds, Any], None],
    rank: int, options: Options, barrier: Any, shared: Any, answers: Any,
) -> None:  # fmt: skip
    rounds = Rounds(barrier)
    learner(rank, options, rounds, shared)
    answers.put(rounds.seconds)


def _next_answer(answers: Any, processes: list[Any]) -> list[float]:
    while True:
        try:
            found: list[float] = answers.get(timeout=0.5)
            return found
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise RuntimeError("a learner failed; it said why above") from None


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def answer(seconds: list[float], what: str) -> None:
    """Print what a round is here and what each one took."""
    print(json.dumps({"seconds": seconds, "what": what}), flush=True)
