"""A learner whose training, codec work and connections share one thread and one event loop, as in the simulator."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch
from in_process import settings_with
from training import tiny_model

from diloco_common.observe.logs import Log
from diloco_common.observe.metrics import WorkerMetrics
from diloco_common.ports import World
from diloco_worker.core.acts import Act
from diloco_worker.core.connection import Caller
from diloco_worker.core.replica import Replica
from diloco_worker.learner import make_learner
from diloco_worker.shell.boundary import Start
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.grpc_transport import GrpcTransport
from diloco_worker.shell.telemetry import LearnerTelemetry
from waiting import until_async


class InLoop(Executor):
    """Runs jobs in the event loop, one after the other, each a turn of the loop after it was submitted."""

    def submit(self, job: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(job(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        asyncio.get_running_loop().call_soon(run)
        return future


class InLoopBackground:
    """Runs the connections as a task of the same loop."""

    def start(self, connections: Connections) -> None:
        self._connections = connections
        self._running = asyncio.create_task(connections.run())

    def post(self, acts: Sequence[Act]) -> None:
        asyncio.get_running_loop().call_soon(self._connections.perform, acts)

    def stop(self, settle_s: float) -> None:
        self._running.cancel()


def test_a_learner_without_threads_seeds_contributes_and_gets_versions(serve, loop) -> None:
    shard = serve(settings_with(sync={"fragments": 2}, run={"tokens": 400}))
    before = {thread.name for thread in threading.enumerate()}

    async def train() -> list[str]:
        model = tiny_model()
        caller = Caller("local", "cat", "process of cat")
        world = World(time.monotonic, time.thread_time, random.Random(0), lambda count, name: InLoop())
        telemetry = LearnerTelemetry(caller, world.clock, WorkerMetrics(), Log("cat"))
        learner = make_learner(
            Replica(model), [shard.address], caller, GrpcTransport, world, InLoopBackground(),
            telemetry, Start(),
        )  # fmt: skip
        learner.start()
        await until_async(learner.begin, "the model holds every fragment")

        def step() -> bool:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01)
            learner.step(tokens=8)
            return learner.done

        await until_async(step, "the budget is reached")
        await learner.connections.leave(1.0)
        learner.close()
        return [thread.name for thread in threading.enumerate() if thread.name not in before]

    begun = loop.run(train())

    assert [name for name in begun if name.startswith(("diloco-network", "diloco-waker", "diloco-codec"))] == []
    assert shard.core.tokens_merged >= 400
    assert shard.member_state("cat") == "left"
