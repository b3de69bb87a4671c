"""A live page: asks the shards, keeps their answers, and serves them, in one event loop.

The members to ask and the credentials are re-read repeatedly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco_common.errors import ConfigError, plain
from diloco_common.observe.http import REST, finite
from diloco_common.observe.http_listener import HttpListener, TlsDoor
from diloco_common.trust.files import REVOKED, DenyList, TlsFiles, TlsFolder
from diloco_common.trust.identity import Proof
from diloco_common.wire.addresses import parse_address
from diloco_deploy import ASK_S, EVERY_S, THREADS_MAX
from diloco_deploy.cluster.asking import Asker, NoAnswer, ask
from diloco_deploy.cluster.roll_call import addresses_in, read_record
from diloco_deploy.web.feed import Feed


@dataclass(frozen=True)
class PageMembers:
    shards: Mapping[str, str | None]
    """Name -> host:port of HTTP; None: it has none now."""
    learners: Sequence[str] = ()
    """Expected ids; more may join."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Name -> how its process last ended, in words."""


Watched = Callable[[], PageMembers]
"""Called repeatedly; never raises."""


def given(addresses: Sequence[str]) -> Watched:
    """Shards at fixed addresses. Raises ConfigError."""
    members = PageMembers({f"shard at {address}": str(parse_address(address)) for address in addresses})
    return lambda: members


def in_folder(folder: Path) -> Watched:
    """The cluster of `diloco up` in a folder, now or later."""

    def look() -> PageMembers:
        found = {name: http for name, http in addresses_in(folder).items() if name.startswith("shard-")}
        record = read_record(folder)
        if record is None:
            return PageMembers(found)
        shards = {f"shard-{i}": found.get(f"shard-{i}") for i in range(record.shards)}
        why = {name: member.why for name, member in record.members.items() if member.process in ("died", "lost")}
        return PageMembers(shards, [f"worker-{i}" for i in range(record.workers)], why)

    return look


class PageCredentials:
    """The credentials for asking shards, read again when their files change. Owned by one event loop."""

    def __init__(self, tls: Path | None, token: str | None) -> None:
        """`tls`: folder of an observer's or admin's certificate. Raises ConfigError, SecretExposed."""
        self.tls, self.token = tls, token
        self._folder = None if tls is None else TlsFolder(tls, needs_pair=True)
        self._asker = Asker(tls, token)
        self._is_old = False  # newer files exist

    def asker(self) -> Asker:
        """The current asker. Unusable files change nothing, since they may be half written."""
        if self._folder is not None:
            self._is_old |= self._folder.refresh()
        if self._is_old:
            with contextlib.suppress(ConfigError):
                self._asker = Asker(self.tls, self.token)
                self._is_old = False
        return self._asker


def door_of(certificate: Path, revoked: Path | None) -> TlsDoor:
    """Serve with the certificate in a folder; its ca.pem verifies observers and admins.

    `revoked`: a deny-list instead of the one in the folder. Raises ConfigError, SecretExposed.
    """
    folder = TlsFolder(certificate, needs_pair=True)
    deny_list = DenyList(revoked or certificate / REVOKED, is_required=revoked is not None)

    def files() -> TlsFiles:
        folder.refresh()
        return folder.files

    def is_welcome(proof: Proof) -> bool:
        deny_list.refresh()
        return proof.serial not in deny_list.serials

    return TlsDoor(files, is_welcome)


_RETRY = b"retry: 500\n\n"
_log = logging.getLogger("diloco.web")


class LivePage:
    """Serves one page. Use it in one event loop: `start`, then `stop`."""

    def __init__(
        self,
        listen: str,
        watched: Watched,
        credentials: PageCredentials,
        *,
        asks_key: bool,
        door: TlsDoor | None = None,
    ) -> None:
        """`asks_key`: require a key that is made here, or the run's token. `door`: serve over TLS."""
        self._watched, self._credentials = watched, credentials
        self._members = watched()
        self._key = secrets.token_urlsafe(16) if asks_key else None
        self._scheme = "http" if door is None else "https"
        self._feed = Feed(time.time())
        self._life = secrets.token_hex(4)  # distinguishes numbers of an earlier start
        self._messages: dict[int, bytes] = {}  # number that a viewer knows -> its next message
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="diloco-web-ask")
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._telling: asyncio.Task[None] | None = None
        try:
            from diloco_deploy.web.app import Access, make_app
        except ImportError:
            raise ConfigError(
                "the live page needs starlette, which is not installed: pip install 'decoupled-diloco-ops[web]'"
            ) from None
        app = make_app(self, Access(self._key, credentials.token, None if door is None else door.admits))
        self._listener = HttpListener(listen, app, door)

    async def start(self) -> str:
        """Listen, start asking, and return the address of the page. Raises ConfigError or InUse."""
        address = await self._listener.start()
        self._telling = asyncio.create_task(self._tell(), name="web-tell")
        return f"{self._scheme}://{_shown(address)}/" + ("" if self._key is None else f"#key={self._key}")

    async def stop(self) -> None:
        """End all streams and stop. Calls after the first do nothing."""
        self._ending.set()
        self._changed.set()
        for task in (*self._asking.values(), *([self._telling] if self._telling else [])):
            task.cancel()
        await self._listener.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ for the application

    async def stream(self, last_seen: str) -> AsyncIterator[bytes]:
        life, _, number = last_seen.partition(".")
        seen = int(number) if life == self._life and number.isdecimal() else 0
        yield _RETRY
        while not self._ending.is_set():
            seen, message = self._message(seen)
            yield message
            await self._changed.wait()

    def learners(self, *, sort: str, descending: bool, find: str, page: int) -> dict[str, Any]:
        return self._feed.learners(sort=sort, descending=descending, find=find, page=page, now=time.time())

    # ------------------------------------------------------------ helpers

    def _message(self, seen: int) -> tuple[int, bytes]:
        """The newest number, and the message for viewers at number `seen`, made once for all of them."""
        made = self._messages.get(seen)
        if made is None:
            state = self._feed.since(seen, time.time())
            body = json.dumps(finite(state), allow_nan=False, separators=(",", ":"))
            made = f"id: {self._life}.{state['seq']}\ndata: {body}\n\n".encode()
            self._messages[seen] = made
            self._newest = int(state["seq"])
        return self._newest, made

    async def _tell(self) -> None:
        """Start asking new shards, and wake the viewers, at a steady pace."""
        has_failed = False
        while True:
            began = time.monotonic()
            try:
                self._look()
            except Exception:  # the page continues with what it has
                if not has_failed:
                    _log.exception("the page could not be updated; this is logged once")
                has_failed = True
            self._messages.clear()
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            await asyncio.sleep(max(EVERY_S, REST * (time.monotonic() - began)))

    def _look(self) -> None:
        self._members = self._watched()
        self._feed.expect(self._members.shards, self._members.learners)
        for name in self._members.shards:
            if name not in self._asking:
                self._asking[name] = asyncio.create_task(self._ask(name), name=f"web-ask-{name}")
        self._feed.sample(time.time())

    async def _ask(self, name: str) -> None:
        """Ask one shard repeatedly. A shard that hangs delays no other."""
        loop = asyncio.get_running_loop()
        while True:
            address = self._members.shards.get(name)
            took_s = 0.0
            if address is None:
                self._feed.silent(name, self._members.why.get(name) or "it is not running", time.time())
            else:
                epoch, after = self._feed.traced(name)
                try:
                    said = await loop.run_in_executor(
                        self._threads, ask, self._credentials.asker(), address, epoch, after, ASK_S
                    )
                    began = time.perf_counter()
                    self._feed.heard(name, said.status, said.rounds, time.time(), said.asked_at)
                    took_s = time.perf_counter() - began
                except NoAnswer as error:
                    self._feed.silent(name, str(error), time.time(), error.code)
                except Exception as error:  # of any kind: ask again
                    self._feed.silent(name, f"its answer makes no sense: {plain(repr(error))[:200]}", time.time())
            await asyncio.sleep(max(EVERY_S, REST * took_s))


def _shown(address: str) -> str:
    """The address for a browser on this machine: loopback for "every interface"."""
    for every, here in (("0.0.0.0:", "127.0.0.1:"), ("[::]:", "[::1]:")):
        if address.startswith(every):
            return here + address.removeprefix(every)
    return address
