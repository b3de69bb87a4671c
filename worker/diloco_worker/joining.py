"""`join`: a learner in the real world: wall clock, real randomness and threads, gRPC, files, HTTP."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import nn

from diloco_common.addresses import parse_address
from diloco_common.codec import native
from diloco_common.endpoints import write_address
from diloco_common.errors import CannotConnect, ConfigError
from diloco_common.history import HistoryFile
from diloco_common.http import HttpServer
from diloco_common.identity import check_learner_id
from diloco_common.logs import Log
from diloco_common.metrics import WorkerMetrics
from diloco_common.ports import World
from diloco_worker.boundary import Start
from diloco_worker.connections import Connections
from diloco_worker.core.connection import Caller
from diloco_worker.core.dialing import ANNOUNCE_WAIT_S
from diloco_worker.core.replica import Replica
from diloco_worker.grpc_transport import GrpcTransport
from diloco_worker.learner import Learner, make_learner
from diloco_worker.network_thread import NetworkThread
from diloco_worker.telemetry import LearnerTelemetry

LOOK_S = 0.2
"""While joining; sooner where something arrives."""


def join(
    shards: str | Sequence[str],
    model: nn.Module,
    *,
    run: str = "local",
    learner_id: str = "",
    token: str | None = None,
    mean_merge: Collection[str] | None = None,
    inner_step: int = 0,
    tokens: int = 0,
    http: str | None = None,
    address_file: Path | None = None,
    history: Path | None = None,
    wait_s: float | None = None,
    resumed: bool = False,
) -> Learner:
    """Join a run, and return once the model holds the latest version of every fragment.

    Args:
        shards: addresses of all shards, host:port, in any order; a string separates them by commas.
        model: its trainable parameters are synchronised; buffers and the optimizer stay local.
        run: id of the run, as the shards have it.
        learner_id: unique in the run; made from host name and process id if empty.
        token: bearer token, where the shards ask for one.
        mean_merge: names of parameters merged by plain mean; None means embeddings and the output head.
        inner_step: where a resumed learner's count of inner steps goes on.
        tokens: where its count of tokens goes on.
        http: address on which to serve /metrics, /healthz, /readyz and /status; None serves nothing.
        address_file: write the address that is served here, as soon as it is known.
        history: record what happens to this learner in this folder, as JSON lines; None records nothing.
        wait_s: seconds to wait for shards that do not answer; None waits for ever, and says so every 10 s.
        resumed: the model holds values of this run, of a checkpoint: one shard that answers is enough. Training goes
            on from these values where a shard is away, and what it adds is contributed once the shard is back.

    Raises:
        ConfigError: an address is no address, or the shards do not make up one run.
        UnsupportedModel: the model cannot be synchronised; the message says which parameter, and what to do.
        CannotConnect: not all shards answered within `wait_s`.
        Refusal: a shard refuses this learner (other model, other run, wrong token, ...).
    """
    addresses = _addresses(shards)
    name = learner_id or f"{socket.gethostname()[:40]}-{os.getpid()}"
    check_learner_id(name)
    replica = Replica(model, mean_merge)
    world = real_world()
    caller = Caller(run, name, f"{world.random.getrandbits(64):016x}")
    recorded = None if history is None else HistoryFile(history, name)
    telemetry = LearnerTelemetry(caller, world.clock, WorkerMetrics(), Log(name), recorded)
    if replica.device.type == "cpu" and isinstance(why := native.find(), str):
        telemetry.log.warning("no native kernels: encoding takes several times as long", why=why)
    network = NetworkThread(None if http is None else partial(_http_server, http, telemetry))
    learner = make_learner(
        replica, addresses, caller, partial(GrpcTransport, bearer_token=token), world, network, telemetry,
        Start(inner_step, tokens, resumed),
    )  # fmt: skip
    try:
        learner.start()
        if address_file is not None:
            write_address(address_file, "worker", name, http=network.http_address)
        _wait_until_joined(learner, world, wait_s)
    except BaseException:
        learner.close()
        raise
    return learner


def real_world() -> World:
    """Real time, chance and threads."""
    return World(time.monotonic, time.thread_time, random.SystemRandom(), _threads)


def _threads(count: int, name: str) -> Executor:
    """Threads in which torch starts no second OpenMP team: two teams on the same cores are slower than one.

    `torch.set_num_threads` decides for the calling thread, and for threads that are yet to begin: put that back.
    """
    executor = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(1,))
    threads = torch.get_num_threads()
    executor.submit(int).result()
    torch.set_num_threads(threads)
    return executor


def _addresses(shards: str | Sequence[str]) -> list[str]:
    """Raises ConfigError."""
    named = shards.split(",") if isinstance(shards, str) else list(shards)
    addresses = [str(parse_address(a.strip())) for a in named if a.strip()]
    if not addresses:
        raise ConfigError("no shard addresses given; name all shards, such as ps-0:50051,ps-1:50051")
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    if twice:
        raise ConfigError(f"shard {twice[0]} is named twice; name every shard once")
    return addresses


def _http_server(address: str, telemetry: LearnerTelemetry, connections: Connections) -> HttpServer:
    return HttpServer(
        address,
        registry=telemetry.metrics.registry,
        status=lambda: telemetry.status(connections.pulse, connections.figures()),
        ready=lambda: telemetry.readiness,
    )


def _wait_until_joined(learner: Learner, world: World, wait_s: float | None) -> None:
    """Raises CannotConnect, and what `Learner.begin` raises."""
    began = said = world.clock()
    while not learner.begin():
        missing = learner.telemetry.readiness[1]
        now = world.clock()
        if wait_s is not None and now - began > wait_s:
            raise CannotConnect(f"no run to join after {wait_s:g} s: {missing}")
        if now - said >= ANNOUNCE_WAIT_S:
            learner.telemetry.log.event("waiting", for_s=round(now - began), why=missing)
            said = now
        learner.poll(LOOK_S)
