"""Shared by the peers' scripts (peer_*.py): options, learner processes that start each round together, and the answer.

Each script runs under the Python in which its peer is installed. So this file needs only the standard library, and
imports nothing of this project. A script prints its answer last, as one line of JSON.
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
"""The parameters form this many equal tensors."""
SYNC_S = 300.0
"""Longest wait for the other learners, in seconds."""


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
    """Measures the rounds of a learner. All learners begin each round together."""

    def __init__(self, barrier: Any) -> None:
        self.seconds: list[float] = []
        self._barrier = barrier

    def time(self, work: Callable[[], None]) -> None:
        self._barrier.wait(SYNC_S)
        began = time.perf_counter()
        work()
        self.seconds.append(time.perf_counter() - began)


def run_learners(learner: Callable[[int, Options, Rounds, Any], None], options: Options, shared: Any) -> list[float]:
    """Run `learner(rank, options, rounds, shared)` in one spawned process per learner.

    Returns the seconds of each round, of the slowest learner. The first round is left out, because it makes the
    connections. Raises RuntimeError if a learner fails.
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
                raise RuntimeError("a learner failed; its own message is above") from None


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def answer(seconds: list[float], what: str) -> None:
    """Print the seconds of each round, and `what` a round consists of."""
    print(json.dumps({"seconds": seconds, "what": what}), flush=True)
