"""One server process: starts and ends gRPC, HTTP and the shard.

It builds the production world: the wall clock, real threads, the system's randomness, and files.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2

from diloco_common.codec import memory, native
from diloco_common.errors import EXIT_OK, DataError, DilocoError
from diloco_common.observe.history import HistoryFile
from diloco_common.observe.http import HttpServer, check_http_is_meant
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics import MetricsRegistry, installed
from diloco_common.observe.metrics.shard import ReaderMetrics, ShardMetrics
from diloco_common.ports import Clock, World
from diloco_common.settings import Settings
from diloco_common.trust.credentials import Credentials
from diloco_common.trust.files import TlsFiles
from diloco_common.trust.identity import Identity
from diloco_common.wire import rpc
from diloco_common.wire.addresses import bind_socket, in_use, parse_address, write_address
from diloco_common.wire.calls import SETTLE_S
from diloco_common.wire.follower import Follower
from diloco_common.wire.grpc_transport import GrpcTransport
from diloco_common.wire.messages import FollowRequest
from diloco_server.shell.access import AccessFiles
from diloco_server.shell.health import Health
from diloco_server.shell.host import ShardHost
from diloco_server.shell.quotas import connections_allowed, connections_wanted, files_max, raise_limit
from diloco_server.shell.readers import Mirror, Standby, tell_replaced
from diloco_server.shell.service import Service
from diloco_server.shell.servicer import ParameterServicer
from diloco_server.shell.status import record_since, rounds_since, shard_status, standby_status
from diloco_server.storage.filesystem import Disk, FolderLock
from diloco_server.storage.standby import StandbyFolder
from diloco_server.storage.store import open_store
from diloco_server.storage.version_file import Origin

LAST_WRITE_S = 10.0
"""Seconds for writes to finish after `SETTLE_S`; then the data folder stays locked. In all less than `NOTICE_S`."""


def real_world() -> World:
    return World(
        clock=time.monotonic,
        cpu_clock=time.thread_time,
        random=random.SystemRandom(),
        threads=lambda count, name: ThreadPoolExecutor(count, thread_name_prefix=name),
        give_back=memory.give_back,
    )


class ShardServer:
    """A serving shard. Use it in one event loop: `start`, then `stop`."""

    def __init__(self, settings: Settings, clock: Clock | None = None, *, replaces: str = "") -> None:
        """`clock`: seconds, for leases and grace windows; None: time while this process is awake.

        `replaces`: the address of the shard whose standby this was. Raises ConfigError, and InUse or DataError if the
        data folder is not available.
        """
        self.settings = settings
        self.grpc_address = ""
        self.http_address = ""
        shard, is_mirror = settings.shard, settings.shard.role == "mirror"
        world, metrics = real_world(), ShardMetrics()
        name = f"mirror-{settings.run.site or shard.index}" if is_mirror else f"shard-{shard.index}"
        self._access = AccessFiles(settings, time.time, Log(name))
        self._credentials = rpc.ServerCredentials(self._access.tls) if self._access.tls is not None else None
        store, self._lock = open_store(
            settings, epoch_in_memory=1 + world.random.randrange(2**31), first_epoch=int(time.time())
        )
        folder = settings.run.history
        self.host = ShardHost(
            settings, store, world, metrics=metrics, log=Log(name), clock=clock,
            history=HistoryFile(folder, name) if folder else None,
        )  # fmt: skip
        self.service = Service(self.host)
        self._replaces = replaces
        self._mirror, registry = None, metrics.registry
        if is_mirror:
            self._mirror = Mirror(self.host, follower := follower_of(settings, world, self.host.log))
            registry = metrics_of(follower, "mirror", self.host.ready)
        self._http = HttpServer(
            settings.shard.http,
            registry=registry,
            status=lambda: shard_status(self.host, self.grpc_address) | self._of_process(),
            ready=self.host.ready,
            bearer_token=self._access.bearer_token,
            door=self._access.door(),
            pages={"/rounds": self._rounds, "/record": self._record},
        )
        if self._access.tls is not None:
            metrics.certificates.follow(self._access.served)
        self._connections_max = connections_allowed(settings.shard, files_max())
        self._health = Health(
            settings.run.id, ("", rpc.SERVICE), self._access.callers, self.host.telemetry.call_refused
        )
        self._server = grpc.aio.server(
            options=[*rpc.SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", self._connections_max)]
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.hangs = False
        """Whether a write to the data folder may hang forever, in a thread that would keep the process from ending."""

    async def start(self) -> None:
        """Bind both ports, recover the data folder, and serve. Raises ConfigError, InUse or DataError."""
        check_http_is_meant("shard.http", self.settings.shard.http, self.settings.security)
        servicer = ParameterServicer(
            self.service, self.settings.run.id, self._access.callers, self.host.telemetry.call_refused,
            self._access.bearer_token, lambda: rpc.hello(time.time(), installed()),
        )  # fmt: skip
        self._server.add_generic_rpc_handlers((servicer.handler(), self._health.handler()))
        listen = parse_address(self.settings.shard.listen)
        bind_socket(str(listen)).close()  # gRPC does not say why it cannot bind
        try:
            port = self._bind(str(listen))
        except RuntimeError:
            raise in_use(self.settings.shard.listen) from None
        self.http_address = await self._http.start()
        await self.host.recover()
        await self._server.start()
        self.grpc_address = f"{str(listen).rpartition(':')[0]}:{port}"
        self._tasks = [
            asyncio.create_task(self.host.run(), name="ticking"),
            asyncio.create_task(self._access.watch(self._renewed, self._revoked), name="watching files"),
        ]
        if self._replaces:
            self._tasks.append(asyncio.create_task(self._tell_replaced(), name="telling who was replaced"))
        if self._mirror is not None:
            shard = self.settings.shard
            self._tasks.append(
                asyncio.create_task(
                    self._mirror.run(self.settings.run.site, shard.known_as or self.grpc_address), name="mirroring"
                )
            )
        self._health.set(health_pb2.HealthCheckResponse.SERVING)
        if isinstance(why := native.find(), str):
            self.host.log.warning("no native kernels: merging and encoding take several times as long", why=why)
        else:
            self.host.log.event("kernels", origin=native.origin())
        if self._connections_max < (wanted := connections_wanted(self.settings.shard)):
            self.host.log.warning(
                "few files may be open, so fewer connections are accepted: raise the hard limit (ulimit -Hn)",
                files=files_max(), connections=self._connections_max, wanted=wanted,
            )  # fmt: skip
        if self.settings.shard.data_dir is None and self._mirror is None:
            self.host.log.warning("versions are kept in memory only: a restart loses them (shard.data_dir keeps them)")
        self._access.say()
        self.host.log.event(
            "serving",
            run=self.settings.run.id,
            grpc=self.grpc_address,
            http=self.http_address,
            epoch=self.host.shard.epoch,
        )

    def _of_process(self) -> dict[str, Any]:
        """Process facts for /status: the package, seconds until its certificate expires, and the time since 1970."""
        tls = self._access.tls
        ends = None if tls is None or tls.certificate is None else tls.certificate.not_valid_after_utc.timestamp()
        now, left_s = time.time(), None if ends is None else round(ends - time.time())
        return {"package": installed(), "certificate_s": left_s, "clock": round(now, 1)}

    def _rounds(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """The answer of /rounds?epoch=E&after=N. Raises ValueError."""
        return rounds_since(self.host, int(asked.get("epoch", 0)), int(asked.get("after", 0)))

    def _record(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """The answer of /record?epoch=E&after=N. Raises ValueError."""
        return record_since(self.host, int(asked.get("epoch", 0)), int(asked.get("after", 0)))

    def _bind(self, address: str) -> int:
        """Bind gRPC, and return its port. Raises RuntimeError."""
        if self._credentials is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, self._credentials.grpc))

    async def _tell_replaced(self) -> None:
        """Tell the replaced shard that it is replaced; see `readers.tell_replaced`."""
        security = self.settings.security
        transport = GrpcTransport(self._replaces, Credentials(security.tls, security.token_file))
        try:
            await tell_replaced(self.host, transport, Identity(self.settings.run.id))
        finally:
            await transport.close(0.0)

    def _renewed(self, files: TlsFiles) -> None:
        assert self._credentials is not None
        self._credentials.exchange(files)

    def _revoked(self, serials: AbstractSet[str]) -> list[str]:
        """End the leases of these certificates, and not just open calls, which may use other certificates by now."""
        leases = self.service.leases_of(serials)
        for lease in leases:
            self.host.revoke(lease)
        return [lease.learner_id for lease in leases]

    async def abandon(self) -> None:
        """Clean up after a failed `start`, while the event loop still runs."""
        self.host.close()
        await self._server.stop(None)
        await self._http.stop()
        await self._release()

    async def stop(self, drain_s: float = SETTLE_S) -> None:
        """Drain for at most `drain_s` seconds, and then end. Calls after the first do nothing."""
        self._health.set(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.host.drain(drain_s)
        for task in self._tasks:
            task.cancel()
        self.host.close()
        await self._server.stop(grace=1.0)
        await self._http.stop()
        await self._release()
        self.host.log.event("ended", tokens_merged=self.host.shard.tokens_merged)

    async def _release(self) -> None:
        """Unlock the data folder once no thread writes to it.

        If a write hangs, this process keeps the lock, because the write may still land among another owner's files.
        """
        if self._lock is None:
            return
        if await self.host.work.writes_ended(LAST_WRITE_S):
            self._lock.release()
        else:
            self.hangs = True
            self.host.log.warning(
                "a write to the data folder hangs: the folder stays locked until this process has ended",
                folder=self.settings.shard.data_dir,
            )


def follower_of(settings: Settings, world: World, log: Log) -> Follower:
    """The follower of the shard that this process mirrors or stands by for. Raises ConfigError, SecretExposed."""
    shard, security = settings.shard, settings.security
    transport = GrpcTransport(shard.mirror_of or shard.standby_of, Credentials(security.tls, security.token_file))
    return Follower(transport, Identity(settings.run.id), FollowRequest(shard.role), world, log)


def metrics_of(follower: Follower, role: str, ready: Callable[[], tuple[bool, str]]) -> MetricsRegistry:
    metrics = ReaderMetrics()
    metrics.follow(role, lambda: (follower.is_up, ready()[0], *follower.behind, follower.skipped))
    return metrics.registry


async def serve(settings: Settings, address_file: Path | None) -> None:
    """Run a shard until SIGTERM or SIGINT. Raises DilocoError if it cannot start or continue."""
    raise_limit()
    replaces = settings.shard.standby_of
    if replaces:
        if not await stand_by(settings):
            return
        shard = settings.shard.model_copy(update={"standby_of": ""})
        settings = settings.model_copy(update={"shard": shard})
    server = ShardServer(settings, replaces=replaces)
    ending = asyncio.Event()
    on_signals(lambda: ending.set() if server.grpc_address else _leave())
    try:
        await server.start()
    except DilocoError:
        await server.abandon()
        raise
    if address_file is not None:
        write_address(address_file, "shard", server.host.log.name, grpc=server.grpc_address, http=server.http_address)
    await _first_of(ending, server.host.work.broken)
    if server.host.work.broken.is_set() and not ending.is_set():
        await server.abandon()
        if server.host.replaced is not None:
            raise server.host.replaced
        why = server.host.work.why_broken
        raise DilocoError(f"{why}. The versions announced so far are whole: start the shard again")
    await server.stop()
    if server.hangs:
        _leave()


async def stand_by(settings: Settings) -> bool:
    """Be a standby until it is promoted (True), or until SIGTERM or SIGINT. Raises DilocoError."""
    shard, world, log = settings.shard, real_world(), Log(f"standby-{settings.shard.index}")
    assert shard.data_dir is not None, "checked with the settings"
    access = AccessFiles(settings, time.time, log)
    try:
        disk = Disk(shard.data_dir)
        lock = FolderLock(shard.data_dir)
        folder = StandbyFolder(disk)
    except OSError as error:
        raise DataError(f"shard.data_dir {shard.data_dir} cannot be used: {error.strerror}") from None
    threads = world.threads(1, "diloco-storage")
    follower = follower_of(settings, world, log)
    standby = Standby(follower, folder, Origin.of(settings), threads, log)
    http = HttpServer(
        shard.http, registry=metrics_of(follower, "standby", standby.ready), ready=standby.ready,
        bearer_token=access.bearer_token,
        status=lambda: standby_status(standby, settings, log.name), door=access.door(),
    )  # fmt: skip
    check_http_is_meant("shard.http", shard.http, settings.security)
    ending = asyncio.Event()
    on_signals(ending.set)
    tasks: list[asyncio.Task[object]] = []
    try:
        log.event("standing by", of=shard.standby_of, folder=shard.data_dir, http=await http.start())
        tasks += [asyncio.create_task(do) for do in (standby.run(), ending.wait(), access.watch())]
        running, ended, _ = tasks
        await asyncio.wait((running, ended), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            log.event("promoted", folder=shard.data_dir)
        return folder.is_promoted
    except OSError as error:
        raise DataError(f"shard.data_dir {shard.data_dir}: {error.strerror}") from None
    finally:
        for task in tasks:
            task.cancel()
        await http.stop()
        threads.shutdown(wait=True, cancel_futures=True)
        lock.release()


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def _leave() -> NoReturn:
    """End at once, whatever the threads are doing: a disk write cannot be interrupted, and nothing is left to save."""
    os._exit(EXIT_OK)


def on_signals(act: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, act)
