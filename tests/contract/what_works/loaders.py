"""Where data come from, and the processes and threads of a training script."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from diloco_worker import Learner
from what_works.rows import Rows, Stream, square
from what_works.script import DEVICE, RATE, Cases, Ground, Script, loop, small, usual

CASES = Cases()


def fed(make: Callable[[], DataLoader[Tensor]], *, after: bool) -> Script:
    """A loop that draws its batches from a loader, which is made before or after `join`."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loader: list[DataLoader[Tensor]] = [] if after else [make()]
    batches: list[Iterator[Tensor]] = [] if after else [iter(loader[0])]

    def joined(learner: Learner) -> None:
        if after:
            batches.append(iter(make()))

    def step() -> Tensor:
        x = next(batches[0]).to(DEVICE, non_blocking=True)
        return loop(model, optimizer, lambda: (model(x) - x[:, :2].sin()).square().mean())()

    return Script(model, step, joined=joined)


@CASES.script("DataLoader without workers")
def no_workers() -> Script:
    return fed(lambda: DataLoader(Rows(), batch_size=8), after=False)


@CASES.script("DataLoader with forked workers, made before join")
def forked_before() -> Script:
    return fed(lambda: DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork"), after=False)


@CASES.script("DataLoader with forked workers, made after join")
def forked_after() -> Script:
    return fed(lambda: DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork"), after=True)


@CASES.script("DataLoader with persistent workers")
def persistent() -> Script:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loader = DataLoader(
        Rows(), batch_size=8, num_workers=1, multiprocessing_context="fork", persistent_workers=True, shuffle=True
    )

    def step() -> Tensor:
        for x in loader:  # an epoch
            loss = loop(model, optimizer, lambda x=x: (model(x) - x[:, :2].sin()).square().mean())()
        return loss

    return Script(model, step)


@CASES.script("DataLoader with spawned workers")
def spawned() -> Script:
    return fed(
        lambda: DataLoader(
            Rows(), batch_size=8, num_workers=1, multiprocessing_context="spawn", pin_memory=DEVICE.type != "cpu"
        ),
        after=True,
    )


@CASES.script("DataLoader with forkserver workers")
def forkserver() -> Script:
    return fed(
        lambda: DataLoader(Rows(), batch_size=8, num_workers=1, multiprocessing_context="forkserver"), after=True
    )


@CASES.script("a stream (IterableDataset)")
def stream() -> Script:
    return fed(lambda: DataLoader(Stream(), batch_size=8), after=False)


@CASES.script("multiprocessing.Process, a pool of processes")
def pools() -> Script:
    def work(learner: Learner) -> None:
        process = multiprocessing.get_context("fork").Process(target=square, args=(3,))
        process.start()
        process.join()
        assert process.exitcode == 0
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.map(square, [2, 3]) == [4, 9]

    return usual(small(), between=work)


@CASES.script("os.fork and subprocess")
def children() -> Script:
    def work(learner: Learner) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)

    return usual(small(), between=work)


_OF_PARENT: list[Learner] = []


def _step_of_parent() -> None:
    _OF_PARENT[0].step(samples=8)


@CASES("a forked child that calls the learner")
def child_calls(ground: Ground) -> None:
    with ground.learner(small(), "script") as learner:
        _OF_PARENT[:] = [learner]
        fork = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
            pool.submit(_step_of_parent).result(30)


@CASES("training in another thread than the main one")
def in_thread(ground: Ground) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(ground.trains, usual(small())).result(60)


@CASES("join in the main thread, training in another")
def thread_after_join(ground: Ground) -> None:
    model = small()
    step = loop(model)
    with ground.learner(model, "script") as learner, concurrent.futures.ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(lambda: learner.step(samples=8, loss=step())).result(30)
        assert pool.submit(learner.finish).result(30)


@CASES("another thread of the script (a prefetcher)")
def beside(ground: Ground) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="prefetcher")
    thread.start()
    try:
        ground.trains(usual(small()))
    finally:
        ended.set()
        thread.join()


@CASES("a notebook, with an event loop in the thread that trains")
def notebook(ground: Ground) -> None:
    async def cell() -> None:
        ground.trains(usual(small()))

    asyncio.run(cell())


@CASES("two learners in one process")
def two(ground: Ground) -> None:
    models: list[nn.Module] = [small(), small()]
    with ground.learner(models[0], "one") as one, ground.learner(models[1], "two") as two:
        for learner, model in ((one, models[0]), (two, models[1])):
            learner.step(samples=8, loss=loop(model)())
        with ThreadPoolExecutor(2) as pool:  # each waits for a round, which asks both
            assert all(pool.map(lambda learner: learner.finish(), (one, two)))


@CASES("step() without a whole number of tokens or samples")
def no_amount(ground: Ground) -> None:
    amount: Any = 0.5
    with ground.learner(small(), "script") as learner:
        learner.step(samples=amount)
