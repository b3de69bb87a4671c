"""The HTTP server of every process: /metrics, /healthz, /readyz and /status.

A few lines of ASGI, served by `http_listener.py`. The caller defines "ready" and the status. Answers that are slow to
make are cached for a while, so they take only a fraction of the event loop's time, however often somebody asks.

Over TLS (`TlsDoor`), /metrics and /status require a certificate; the other two are open to everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from diloco_common.errors import ConfigError
from diloco_common.observe.http_listener import HttpListener, TlsDoor
from diloco_common.settings import SecuritySettings
from diloco_common.wire.addresses import is_loopback, is_no_name, parse_address

_PATHS = ("/metrics", "/healthz", "/readyz", "/status")
HIDDEN = ("generation", "epoch")
"""Parts of /status that only authorized callers see: with them and the token, anybody could call as a learner."""
Page: TypeAlias = Callable[[Mapping[str, str]], dict[str, Any]]
"""Returns JSON for the parameters of a query. Called in the event loop; raises ValueError if they make no sense."""
REST = 10.0
"""An answer is cached for this many times the time it took to make, so answers take a tenth of a core at most."""
_log = logging.getLogger("diloco.http")


def check_http_is_meant(setting: str, address: str, security: SecuritySettings) -> None:
    """Refuse an address that others can reach, unless it is protected or meant to be open. Raises ConfigError."""
    listen = parse_address(address)
    if is_loopback(listen.host) or security.insecure or security.token_file or security.tls:
        return
    raise ConfigError(
        f"{setting} = {listen} is reachable from other machines, and nothing in `security` is set: anybody there "
        "sees the names and figures of all learners. Set security.tls (only observers and admins see them then) or "
        "security.token_file (generations and epochs then need the token), or security.insecure = true if that is "
        f"meant, or leave {setting} on 127.0.0.1"
    )


class HttpServer:
    """Serves one process's metrics, health and status.

    `status` returns the JSON of /status; `ready` returns whether the process can do its work, and why. Both are called
    in the event loop and must not block.
    """

    def __init__(
        self,
        address: str,
        *,
        registry: CollectorRegistry,
        status: Callable[[], dict[str, Any]],
        ready: Callable[[], tuple[bool, str]],
        alive: Callable[[], tuple[bool, str]] = lambda: (True, "it answers"),
        bearer_token: str | None = None,
        door: TlsDoor | None = None,
        pages: Mapping[str, Page] | None = None,
    ) -> None:
        """`alive`: whether the process makes progress; otherwise it should be restarted.

        `bearer_token`: callers that send it, or call from this machine, see all of /status. `door`: serve over TLS.
        `pages`: more paths, for authorized callers only.
        """
        self._status = status
        self._ready = ready
        self._alive = alive
        self._watchdog: asyncio.Task[None] | None = None
        self._registry = registry
        self._bearer_token = bearer_token
        self._door = door
        self._pages = dict(pages or {})
        self._kept = _Kept()
        self._listener = HttpListener(address, self._answer, door)

    async def start(self) -> str:
        """Listen, and return the bound "host:port". From then on it also reports progress to systemd.
        Raises ConfigError or InUse."""
        address = await self._listener.start()
        self._watchdog = asyncio.create_task(feed_watchdog(lambda: self._alive()[0]), name="watchdog")
        return address

    async def stop(self) -> None:
        """Close the socket. Answers in progress get one second to finish. May be repeated."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._listener.stop()

    async def _answer(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        path = scope["path"]
        if path not in _PATHS and path not in self._pages:
            await _send_json(send, 404, {"error": "no such path", "paths": [*_PATHS, *self._pages]})
        elif scope["method"] not in ("GET", "HEAD"):
            await _send_json(send, 405, {"error": "only GET and HEAD"}, (b"allow", b"GET, HEAD"))
        elif (
            path not in ("/healthz", "/readyz")
            and self._door is not None
            and not self._door.admits(scope["state"]["certificate"])
        ):
            words = "for observers and admins of this run: show a certificate (`diloco certs issue observer/NAME`)"
            await _send_json(send, 403, {"error": words})
        elif path == "/metrics":
            await self._send_metrics(_header(scope, b"accept"), send)
        elif path in self._pages:
            await self._send_page(self._pages[path], scope, send)
        elif path == "/healthz":
            alive, reason = self._alive()
            await _send_json(send, 200 if alive else 503, {"alive": alive, "reason": reason})
        elif path == "/readyz":
            ready, reason = self._ready()
            await _send_json(send, 200 if ready else 503, {"ready": ready, "reason": reason})
        else:
            await self._send_status(send, shows_all=self._is_authorised(scope))

    async def _send_status(self, send: Any, *, shows_all: bool) -> None:
        try:
            if shows_all:
                body = self._kept.get("status", lambda: _json(self._status()))
            else:
                body = self._kept.get("open status", lambda: _json(_without_hidden(self._status())))
        except Exception:  # an error in the status must not look like a dead process
            _log.exception("status failed")
            await _send_json(send, 500, {"error": "the status failed; the log of this process says why"})
        else:
            await _send(send, 200, b"application/json", body)

    async def _send_page(self, page: Page, scope: Mapping[str, Any], send: Any) -> None:
        if not self._is_authorised(scope):
            words = "for callers from this machine, or with the token of the run (Authorization: Bearer)"
            await _send_json(send, 403, {"error": words})
            return
        try:
            answer = page(dict(parse_qsl(scope["query_string"].decode("latin-1"))))
        except ValueError as error:
            await _send_json(send, 400, {"error": str(error)})
        else:
            await _send_json(send, 200, answer)

    async def _send_metrics(self, accept: str, send: Any) -> None:
        try:
            encode, content_type = choose_encoder(accept)
        except (ValueError, TypeError):  # the caller asks for a version that is not a number
            encode, content_type = choose_encoder("")
        await _send(send, 200, content_type.encode(), self._kept.get(content_type, lambda: encode(self._registry)))

    def _is_authorised(self, scope: Mapping[str, Any]) -> bool:
        """Whether the caller showed a certificate, calls from this machine (to a number), or sends the token."""
        if self._door is not None:
            return True  # checked before
        client = scope.get("client")
        if client is not None and is_loopback(client[0]) and is_no_name(_header(scope, b"host")):
            return True  # by number: with a name, another site may have sent a browser here
        sent = _header(scope, b"authorization")
        return self._bearer_token is not None and hmac.compare_digest(
            sent.encode(), f"Bearer {self._bearer_token}".encode()
        )


class _Kept:
    def __init__(self) -> None:
        self._answers: dict[str, tuple[float, bytes]] = {}  # what -> (until when it is valid, the answer)

    def get(self, what: str, make: Callable[[], bytes]) -> bytes:
        began = time.perf_counter()
        until, answer = self._answers.get(what, (0.0, b""))
        if began < until:
            return answer
        answer = make()
        ended = time.perf_counter()
        if len(self._answers) > 8:  # callers may ask for many content types
            self._answers.clear()
        self._answers[what] = (ended + REST * (ended - began), answer)
        return answer


def _header(scope: Mapping[str, Any], name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def _send_json(send: Any, code: int, value: Any, *headers: tuple[bytes, bytes]) -> None:
    await _send(send, code, b"application/json", _json(value), *headers)


async def _send(send: Any, code: int, content_type: bytes, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    fixed = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": code, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


def _json(value: Any) -> bytes:
    return json.dumps(finite(value), default=str, indent=2).encode() + b"\n"


def _without_hidden(value: Any) -> Any:
    """The value without the parts for authorized callers, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_hidden(item) for key, item in value.items() if key not in HIDDEN}
    if isinstance(value, list | tuple):
        return [_without_hidden(item) for item in value]
    return value


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, with null, so every parser can read a diverged run."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


async def feed_watchdog(is_alive: Callable[[], bool], environ: Mapping[str, str] = os.environ) -> None:
    """As long as this process makes progress, tell systemd so, if its unit has `WatchdogSec`.

    Runs until cancelled. Returns at once if nobody listens.
    """
    address, watched = environ.get("NOTIFY_SOCKET"), environ.get("WATCHDOG_USEC")
    if not address or not watched or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.setblocking(False)
        while True:
            if is_alive():
                with contextlib.suppress(OSError):  # systemd is busy or being replaced: the next message reaches it
                    systemd.sendto(b"WATCHDOG=1", address)
            await asyncio.sleep(int(watched) / 1e6 / 4)  # four messages in each interval
