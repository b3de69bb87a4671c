"""The HTTP side of the live page: a small Starlette application over a `Hub`, which has the state; and access control.

GET  /            the page, or a form for the key if one is required
POST /enter       takes the key; answers with a cookie
GET  /events      server-sent events; each is the JSON of `Feed.since`
GET  /learners    one page of learners: sort, descending, find, page
GET  /static/...  files of the page
GET  /readyz      for probes
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from diloco_common.observe.http import finite
from diloco_common.wire.addresses import is_no_name
from diloco_deploy import ASK_S, THREADS_MAX

_SESSION = b"diloco live page"


class Access:
    """Decides who may see the page, in one of three ways.

    Everyone, if the shards require nothing either; callers with a key, as a cookie or bearer token; or, over TLS,
    callers with the certificate of an observer or admin.
    """

    def __init__(
        self, key: str | None, token: str | None = None, admits: Callable[[bytes | None], bool] | None = None
    ) -> None:
        """`key`: required from viewers; None: no key. `token`: the run's token, accepted as well. `admits`: whether
        a certificate suffices."""
        self._key, self._admits = key, admits
        self._words = [word.encode() for word in (key, token) if word]
        session = "" if key is None else hmac.new(key.encode(), _SESSION, hashlib.sha256).hexdigest()
        self.session = session
        """The value of a viewer's cookie. It does not contain the key."""

    def is_key(self, word: str) -> bool:
        given = word.strip().encode()
        return self._key is not None and any(hmac.compare_digest(given, good) for good in self._words)

    def may_look(self, certificate: bytes | None, authorization: str, cookie: str) -> bool:
        """Whether to show the run to a caller with this certificate (PEM), Authorization header and cookie."""
        if self._key is None or (self._admits is not None and self._admits(certificate)):
            return True
        kind, _, word = authorization.partition(" ")
        if kind.lower() == "bearer" and self.is_key(word):
            return True
        return hmac.compare_digest(cookie.encode(), self.session.encode())

    def answers_to(self, host: str) -> bool:
        """Whether we answer to this Host header: any one, if a key is required, as other sites lack its cookie."""
        return self._key is not None or is_no_name(host)


STATIC = Path(__file__).parent / "static"
COOKIE = "diloco_web"
ENTER_BYTES_MAX = 4096
"""Longest key that is read. Strangers may send wrong keys, or none: few are awaited at once, and not for long."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every answer. The page loads nothing from elsewhere, and cannot be framed."""
Answer = Callable[[Request], Awaitable[Response]]


class Hub(Protocol):
    def stream(self, last_seen: str) -> AsyncIterator[bytes]:
        """Messages of server-sent events. `last_seen`: the id of the last one that the caller has, or empty."""

    def learners(self, *, sort: str, descending: bool, find: str, page: int) -> dict[str, Any]:
        """Raises ValueError."""


def make_app(hub: Hub, access: Access) -> Callable[[Any, Any, Any], Awaitable[None]]:
    pages = _Pages(hub, access)
    starlette = Starlette(
        routes=[
            Route("/", pages.page),
            Route("/enter", pages.enter, methods=["POST"]),
            Route("/events", pages.guarded(pages.events)),
            Route("/learners", pages.guarded(pages.learners)),
            Route("/readyz", pages.ready),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )
    return _Strict(starlette, access)


class _Pages:
    """What is answered at each path."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub, self._access = hub, access
        self._entering = asyncio.Semaphore(THREADS_MAX)

    def guarded(self, answer: Answer) -> Answer:
        async def guard(request: Request) -> Response:
            if self._may_look(request):
                return await answer(request)
            return JSONResponse({"error": "open the page first, with the key that the command printed"}, 401)

        return guard

    async def page(self, request: Request) -> Response:
        is_in = self._may_look(request)
        return FileResponse(STATIC / "index.html") if is_in else FileResponse(STATIC / "enter.html", 401)

    async def enter(self, request: Request) -> Response:
        if self._entering.locked():
            return JSONResponse({"error": "too many are entering; try again"}, 503, {"connection": "close"})
        try:
            async with self._entering, asyncio.timeout(ASK_S):
                body = await _key_in(request)
        except (TimeoutError, ClientDisconnect):
            return JSONResponse({"error": "the key did not arrive"}, 408, {"connection": "close"})
        if len(body) > ENTER_BYTES_MAX:
            return JSONResponse({"error": "that is not a key"}, 413)
        if not self._access.is_key(body.decode("utf-8", "replace")):
            return JSONResponse({"error": "that is not the key"}, 403)
        answer = Response(status_code=204)
        name, is_https = _cookie_name(request), request.url.scheme == "https"
        answer.set_cookie(name, self._access.session, httponly=True, samesite="strict", secure=is_https)
        return answer

    async def events(self, request: Request) -> Response:
        headers = {"cache-control": "no-store"}
        stream = self._hub.stream(request.headers.get("last-event-id", ""))
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def learners(self, request: Request) -> Response:
        asked = request.query_params
        try:
            found = self._hub.learners(
                sort=asked.get("sort", "attention"), descending=asked.get("descending") == "1",
                find=asked.get("find", "")[:100], page=int(asked.get("page", 0)),
            )  # fmt: skip
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        body = json.dumps(finite(found), allow_nan=False, separators=(",", ":"))
        return Response(body, media_type="application/json")

    async def ready(self, _: Request) -> Response:
        return JSONResponse({"ready": True, "reason": "serving"})

    def _may_look(self, request: Request) -> bool:
        certificate = request.scope.get("state", {}).get("certificate")
        cookie = request.cookies.get(_cookie_name(request), "")
        return self._access.may_look(certificate, request.headers.get("authorization", ""), cookie)


class _Strict:
    """Refuses requests for another host name, and adds `HEADERS` to every answer."""

    def __init__(self, app: Starlette, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        host = next((value.decode("latin-1") for key, value in scope["headers"] if key == b"host"), "")

        async def send_strictly(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                named = {key.lower() for key, _ in message["headers"]}
                if b"cache-control" not in named:
                    added.append((b"cache-control", b"no-cache"))
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        if not self._access.answers_to(host):
            words = "Open this page by IP address or as localhost, or have it ask for a key (security.token_file).\n"
            await PlainTextResponse(words, 421)(scope, receive, send_strictly)
            return
        await self._app(scope, receive, send_strictly)


async def _key_in(request: Request) -> bytes:
    """The body, cut off once it is too long for a key. Raises ClientDisconnect."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > ENTER_BYTES_MAX:
            break
    return body


def _cookie_name(request: Request) -> str:
    """The name includes the port: a host's cookies go to all its ports, and several pages may be open."""
    return f"{COOKIE}_{request.url.port or 0}"
