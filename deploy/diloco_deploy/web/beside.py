"""The live page beside `diloco up`, in a thread of its own: a page that cannot be served ends no run."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from diloco_common.errors import DilocoError, InUse
from diloco_common.settings import Settings
from diloco_deploy.own_certificates import OwnCertificates
from diloco_deploy.web.command import page_of
from diloco_deploy.web.live_page import LivePage
from diloco_deploy.web.members import in_folder

_START_S = 10.0


class PageThread:
    """Owned by the main thread, which starts and stops it. Nothing else passes between the two."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        """`folder`: of the cluster."""
        self._folder, self._settings = folder, settings
        self._said = "the live page did not start in time"
        self._is_up = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="diloco-web", daemon=True)

    def start(self) -> str:
        """Where the page is, or why there is none, as a line for people."""
        if not self._settings.cluster.page:
            return "no live page: cluster.page is empty"
        self._thread.start()
        self._is_up.wait(_START_S)
        return self._said

    def stop(self) -> None:
        """Repeating it is fine."""
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
