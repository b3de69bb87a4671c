"""`diloco web`: the live page of a run, from any machine that reaches its shards; and the one of `diloco up`."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.errors import EXIT_OK, CannotConnect, DilocoError, InUse
from diloco_common.observe.http import check_http_is_meant
from diloco_common.options import Config, Flag, SettingsOptions, setting, settings_from
from diloco_common.settings import SecuritySettings, Settings
from diloco_common.trust.files import read_bearer_token
from diloco_common.wire.addresses import parse_address, split_addresses
from diloco_deploy import START_S
from diloco_deploy.trust.tending import OwnCertificates
from diloco_deploy.web.live_page import LivePage, PageCredentials, Watched, door_of, given, in_folder


def web(
    *,
    shards: Annotated[
        str | None, Parameter(metavar="HOST:PORT,...", help="HTTP addresses of the run's shards (their shard.http)")
    ] = None,
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "without --shards: folder of the cluster that `diloco up` runs")
    ] = None,
    config: Config = None,
    listen: Annotated[str, Parameter(metavar="HOST:PORT", help="where to serve the page")] = "127.0.0.1:7171",
    tls: Annotated[
        Path | None,
        Parameter(metavar="FOLDER", help="if shards use TLS: folder of an observer's or admin's certificate"),
    ] = None,
    token_file: Annotated[
        str | None, Parameter(metavar="FILE", help="the shared secret of the run; viewers need it too")
    ] = None,
    certificate: Annotated[
        Path | None,
        Parameter(metavar="FOLDER", help="serve over HTTPS with this certificate, such as that of a shard here"),
    ] = None,
    insecure: Annotated[Flag, Parameter(help="allow plaintext on a --listen that other machines reach")] = False,
) -> int:
    """Serve a page that shows a run live: loss, learners, rounds, shards, events. Ends with Ctrl-C.

    Shards are asked once per second. Only this machine can open the page, unless --listen says otherwise. If shards
    require a certificate or a token, viewers need the key in the printed address.
    """
    flags = {
        "cluster.folder": folder, "security.token_file": token_file, "security.insecure": "true" if insecure else None,
    }  # fmt: skip
    settings = settings_from(SettingsOptions(config), flags)
    parse_address(listen)  # a mistake here is named before missing shards
    where, addresses, tls = settings.cluster.folder, split_addresses(shards or ""), tls or settings.security.tls
    if not addresses and not where.is_dir():
        raise CannotConnect(
            f"no cluster is running in {where}: there is no such folder; give the --folder or --config of a run, or "
            "--shards host:port, or start one with `diloco up`"
        )
    tls = tls or (None if addresses else OwnCertificates.observer_in(where))
    page = page_of(listen, given(addresses) if addresses else in_folder(where), settings.security, tls, certificate)
    return asyncio.run(_serve(page, page_is_of=", ".join(addresses) or str(where)))


def page_of(
    listen: str, watched: Watched, security: SecuritySettings, tls: Path | None, certificate: Path | None = None
) -> LivePage:
    """A page that is as protected as the shards: if asking them takes a secret, viewers need one.

    `tls`: folder of an observer's or admin's certificate, for asking shards. `certificate`: folder of the one to serve
    with; plaintext beyond this machine needs a token or `security.insecure`. Raises ConfigError, SecretExposed.
    """
    # The run's own certificates do not protect this page.
    check_http_is_meant("--listen", listen, security.model_copy(update={"tls": certificate}))
    credentials = PageCredentials(tls, read_bearer_token(security))
    asks_key = tls is not None or credentials.token is not None or certificate is not None
    door = None if certificate is None else door_of(certificate, security.revoked)
    return LivePage(listen, watched, credentials, asks_key=asks_key, door=door)


async def _serve(page: LivePage, page_is_of: str) -> int:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    print(f"the live page of {page_is_of}: {await page.start()}", flush=True)
    try:
        await ending.wait()
    finally:
        await page.stop()
    return EXIT_OK


class PageThread:
    """The live page of `diloco up`, on a thread. A page that fails does not end the run.

    Owned by the main thread, which starts and stops it; nothing else passes between the two threads.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder, self._settings = folder, settings
        self._said = "the live page did not start in time"
        self._is_up = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="diloco-web", daemon=True)

    def start(self) -> str:
        """Start the page. Returns its address, or why there is none, as a line to print."""
        if not self._settings.cluster.page:
            return "no live page: cluster.page is empty"
        self._thread.start()
        self._is_up.wait(START_S)
        return self._said

    def stop(self) -> None:
        """Calls after the first do nothing."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(3.0)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        listen = self._settings.cluster.page
        try:
            try:
                page = await self._started(listen)
            except InUse:
                page = await self._started(f"{listen.rpartition(':')[0]}:0")
        except DilocoError as error:
            self._said = f"no live page (cluster.page): {error}"
            return
        finally:
            self._is_up.set()
        await self._ending.wait()
        await page.stop()

    async def _started(self, listen: str) -> LivePage:
        tls = OwnCertificates.observer_in(self._folder)
        page = page_of(listen, in_folder(self._folder), self._settings.security, tls)
        self._said = f"live page: {await page.start()}"
        return page
