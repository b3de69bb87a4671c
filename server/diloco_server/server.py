"""One server process: gRPC, HTTP and the shard, from start to the last goodbye.

It builds the world that the shard runs in: the wall clock, real threads, the system's randomness, files.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from diloco_common import rpc
from diloco_common.addresses import bind_socket, in_use, is_loopback, parse_address
from diloco_common.codec import native
from diloco_common.endpoints import write_address
from diloco_common.errors import EXIT_OK, ConfigError, DilocoError
from diloco_common.history import HistoryFile
from diloco_common.http import HttpServer
from diloco_common.logs import Log
from diloco_common.metrics import ShardMetrics
from diloco_common.ports import Clock, World
from diloco_common.security import read_bearer_token
from diloco_common.settings import Settings
from diloco_protos import parameter_server_pb2_grpc as pb_grpc
from diloco_server.host import ShardHost
from diloco_server.service import Service
from diloco_server.servicer import ParameterServer
from diloco_server.status import shard_status
from diloco_server.storage.folder import open_store

SERVICE = "diloco.v1.ParameterServer"
DRAIN_S = 5.0
"""Seconds that merges have to finish when the process is told to end."""
WRITES_END_S = 2.0
"""Seconds that writes have to end after that, before the data folder is left locked."""
LAST_WRITE_S = 10.0
"""Seconds that such a write has before the process ends under it: all in all less than the 30 s of a container."""


def real_world() -> World:
    """What this process runs in."""
    return World(
        clock=time.monotonic,
        cpu_clock=time.thread_time,
        random=random.SystemRandom(),
        threads=lambda count, name: ThreadPoolExecutor(count, thread_name_prefix=name),
    )


class ShardServer:
    """A shard that serves. Use inside one event loop: `start`, then `stop`."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        """`clock` counts seconds; leases and grace windows are measured by it. None: while this process is awake.

        Raises InUse or DataError where the data folder cannot be had.
        """
        self.settings = settings
        self.grpc_address = ""
        self.http_address = ""
        world, metrics, name = real_world(), ShardMetrics(), f"shard-{settings.shard.index}"
        store, self._lock = open_store(
            settings, epoch_in_memory=1 + world.random.randrange(2**31), first_epoch=int(time.time())
        )
        history = HistoryFile(settings.run.history, name) if settings.run.history else None
        self.host = ShardHost(settings, store, world, metrics=metrics, log=Log(name), history=history, clock=clock)
        self.service = Service(self.host)
        self._http = HttpServer(
            settings.shard.http,
            registry=metrics.registry,
            status=lambda: shard_status(self.host, self.grpc_address),
            ready=self.host.ready,
        )
        self._health = HealthServicer()
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        self._ticking: asyncio.Task[None] | None = None
        self.hangs = False
        """A write to the data folder may be under way for good: its thread would keep the process from ending."""

    async def start(self) -> None:
        """Bind both ports, recover what the data folder holds, and serve. Raises ConfigError, InUse or DataError."""
        bearer_token = _bearer_token_for(self.settings)
        servicer = ParameterServer(self.service, self.settings.run.id, bearer_token, self.host.telemetry.call_refused)
        pb_grpc.add_ParameterServerServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        listen = parse_address(self.settings.shard.listen)
        bind_socket(str(listen)).close()  # gRPC does not tell why it cannot have an address
        try:
            port = self._server.add_insecure_port(str(listen))
        except RuntimeError:
            raise in_use(self.settings.shard.listen) from None
        self.http_address = await self._http.start()
        await self.host.recover()
        await self._server.start()
        self.grpc_address = f"{str(listen).rpartition(':')[0]}:{port}"
        self._ticking = asyncio.create_task(self.host.run(), name="ticking")
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        if isinstance(why := native.find(), str):
            self.host.log.warning("no native kernels: merging and encoding take several times as long", why=why)
        if self.settings.shard.data_dir is None:
            self.host.log.warning("versions are kept in memory only: a restart begins anew (shard.data_dir keeps them)")
        self.host.log.event(
            "serving",
            run=self.settings.run.id,
            grpc=self.grpc_address,
            http=self.http_address,
            epoch=self.host.shard.epoch,
        )

    async def abandon(self) -> None:
        """End what a `start` that failed has left, while there is a loop to end it in."""
        self.host.close()
        await self._server.stop(None)
        await self._http.stop()
        await self._release()

    async def stop(self) -> None:
        """Drain and end. Repeating it is fine."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.host.drain(DRAIN_S)
        if self._ticking is not None:
            self._ticking.cancel()
        self.host.close()
        await self._server.stop(grace=1.0)
        await self._http.stop()
        await self._release()
        self.host.log.event("ended", tokens_merged=self.host.shard.tokens_merged)

    async def _release(self) -> None:
        """Let others into the data folder once no thread writes to it.

        Where a write hangs the lock stays with this process, for the write may yet land, among another owner's files.
        """
        if self._lock is None:
            return
        if await self.host.writes_ended(WRITES_END_S):
            self._lock.release()
        else:
            self.hangs = True
            self.host.log.warning(
                "a write to the data folder hangs: the folder stays locked until this process has ended",
                folder=self.settings.shard.data_dir,
            )

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)


async def serve(settings: Settings, address_file: Path | None) -> None:
    """Run a shard until SIGTERM or SIGINT. Raises DilocoError where it cannot start, or cannot go on."""
    server = ShardServer(settings)
    ending = asyncio.Event()
    on_signals(lambda: ending.set() if server.grpc_address else _leave())
    try:
        await server.start()
    except DilocoError:
        await server.abandon()
        raise
    if address_file is not None:
        write_address(address_file, "shard", server.host.log.name, grpc=server.grpc_address, http=server.http_address)
    await _first_of(ending, server.host.broken)
    if server.host.broken.is_set() and not ending.is_set():
        await server.abandon()
        raise DilocoError(f"{server.host.why_broken}. The versions announced so far are whole: start the shard again")
    await server.stop()
    if server.hangs:
        await server.host.writes_ended(LAST_WRITE_S)
        _leave()


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of them is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def _leave() -> NoReturn:
    """End at once, whatever threads are at: a disk cannot be interrupted, and there is nothing left to hand over."""
    os._exit(EXIT_OK)


def on_signals(act: Callable[[], None]) -> None:
    """Call `act` in the running loop on SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, act)


def _bearer_token_for(settings: Settings) -> str | None:
    """The bearer token that callers must send. Raises ConfigError where an open address has none."""
    bearer_token = read_bearer_token(settings.security)
    listen = parse_address(settings.shard.listen)
    if bearer_token is None and not settings.security.insecure and not is_loopback(listen.host):
        raise ConfigError(
            f"shard.listen = {listen} is reachable from other machines and there is no token. Set "
            "security.token_file (the same token for all shards and workers), or security.insecure = true"
        )
    return bearer_token
