"""The HTTP server of every process: /metrics, /healthz, /readyz and /status.

A few lines of ASGI under uvicorn, inside the caller's event loop. The caller decides what "ready" means and what the
status holds, and keeps secrets out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app

from diloco_common.addresses import bind_socket, bound_address

_PATHS = ("/metrics", "/healthz", "/readyz", "/status")
_log = logging.getLogger("diloco.http")


class HttpServer:
    """Serves one process's metrics, health and status.

    `status` gives the JSON of /status; `ready` says whether the process can do its work, and the reason. Both are
    called in the event loop and must not block.
    """

    def __init__(
        self,
        address: str,
        *,
        registry: CollectorRegistry,
        status: Callable[[], dict[str, Any]],
        ready: Callable[[], tuple[bool, str]],
    ) -> None:
        self._address = address
        self._status = status
        self._ready = ready
        self._metrics = make_asgi_app(registry=registry)
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen, and return the bound "host:port". Raises ConfigError or InUse."""
        assert self._server is None, "started twice"
        sock = bind_socket(self._address)
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]), name="http")
        up = asyncio.create_task(self._server.up.wait(), name="http-up")
        try:
            await asyncio.wait({up, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if self._task.done():
            await self._task  # raises the error, if there is one
            raise RuntimeError("the HTTP server ended while starting")
        return str(bound_address(sock))

    async def stop(self) -> None:
        """Close the socket. Answers in progress get one second to end. Repeating it is fine."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task
        self._server = self._task = None

    async def _answer(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        path = scope["path"]
        if path not in _PATHS:
            await _send_json(send, 404, {"error": "no such path", "paths": _PATHS})
        elif scope["method"] not in ("GET", "HEAD"):
            await _send_json(send, 405, {"error": "only GET and HEAD"}, (b"allow", b"GET, HEAD"))
        elif path == "/metrics":
            await self._metrics(scope, receive, send)
        elif path == "/healthz":
            await _send_json(send, 200, {"alive": True})
        elif path == "/readyz":
            ready, reason = self._ready()
            await _send_json(send, 200 if ready else 503, {"ready": ready, "reason": reason})
        else:
            await self._send_status(send)

    async def _send_status(self, send: Any) -> None:
        try:
            status = self._status()
        except Exception:  # a status that fails must not look like a dead process
            _log.exception("status failed")
            await _send_json(send, 500, {"error": "the status failed; the log of this process says why"})
        else:
            await _send_json(send, 200, status)


class _Server(uvicorn.Server):
    """uvicorn as a guest: it leaves signals to the process around it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


async def _send_json(send: Any, code: int, value: Any, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps(_finite(value), default=str, indent=2).encode() + b"\n"
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": code, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity. This puts null instead, so every parser can read a diverged run."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
