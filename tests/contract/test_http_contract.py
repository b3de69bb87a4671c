"""The HTTP side of a process: health, readiness, status and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from diloco_common.errors import ConfigError, InUse
from diloco_common.observe import http
from diloco_common.observe.http import HttpServer, check_http_is_meant
from diloco_common.observe.http_listener import HttpListener
from diloco_common.settings import SecuritySettings
from diloco_deploy.cluster.asking import Asker
from statuses import fetch_status
from waiting import DEADLINE_S


class Process:
    """A process that has something to say."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        Gauge("diloco_test_answer", "For the test.", registry=self.registry).set(42)
        self.is_ready: tuple[bool, str] = (True, "serving")
        self.status: Callable[[], dict[str, Any]] = lambda: {"version": 7}

    def server(self, address: str = "127.0.0.1:0", **more: Any) -> HttpServer:
        return HttpServer(
            address, registry=self.registry, status=lambda: self.status(), ready=lambda: self.is_ready, **more
        )

    @asynccontextmanager
    async def serving(self, token: str | None = None, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
        server = self.server(bearer_token=token, **more)
        address = await server.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=DEADLINE_S) as browser:
                yield browser
        finally:
            await server.stop()


@pytest.fixture
def process() -> Process:
    return Process()


async def test_metrics_are_served_in_the_prometheus_format(process):
    async with process.serving() as browser:
        answer = await browser.get("/metrics")

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    (family,) = text_string_to_metric_families(answer.text)
    assert (family.name, family.samples[0].value) == ("diloco_test_answer", 42)


@pytest.mark.parametrize(("is_ready", "code"), [((True, "serving"), 200), ((False, "fragment 3 is not seeded"), 503)])
async def test_readiness_says_why(process, is_ready, code):
    process.is_ready = is_ready
    async with process.serving() as browser:
        answer = await browser.get("/readyz")
        assert (await browser.get("/healthz")).status_code == 200, "not ready, and still alive"

    assert answer.status_code == code
    assert answer.json() == {"ready": is_ready[0], "reason": is_ready[1]}


async def test_status_is_json_also_when_a_loss_has_diverged(process):
    process.status = lambda: {"loss": float("nan"), "losses": [1.5, float("inf")], "version": 7}
    async with process.serving() as browser:
        answer = await browser.get("/status?verbose=1")

    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"loss": None, "losses": [1.5, None], "version": 7}


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("POST", "/nothing", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/status", 405),
        ("PUT", "/healthz", 405),
        ("HEAD", "/healthz", 200),
    ],
)
async def test_other_paths_and_methods_are_refused(process, method, path, code):
    async with process.serving() as browser:
        answer = await browser.request(method, path)

    assert answer.status_code == code
    if code == 405:
        assert answer.headers["allow"] == "GET, HEAD"
    if method != "HEAD" and code != 200:
        assert "error" in answer.json()


async def test_a_port_in_use_is_refused_by_name(process):
    async with process.serving() as browser:
        taken = f"127.0.0.1:{browser.base_url.port}"
        second = process.server(taken)
        with pytest.raises(InUse, match=taken):
            await second.start()


SHOWN = {"epoch": 7, "learners": [{"id": "ann", "state": "alive", "generation": 3}], "version": 2}
ROLE = {"role": "shard", "index": 0}
OPEN = {"learners": [{"id": "ann", "state": "alive"}], "version": 2}
TOKEN = "a-token-of-16-or-more"


@pytest.mark.parametrize(
    ("from_here", "token", "sent", "answer"),
    [
        (True, None, None, SHOWN),
        (True, TOKEN, None, SHOWN),
        (False, None, None, OPEN),
        (False, TOKEN, None, OPEN),
        (False, TOKEN, f"Bearer {TOKEN}", SHOWN),
        (False, TOKEN, "Bearer another", OPEN),
        (False, TOKEN, f"Bearer {TOKEN}\u00e9", OPEN),
        (False, None, "Bearer None", OPEN),
    ],
)
async def test_generations_and_epochs_are_for_callers_of_this_machine_and_those_with_the_token(
    process, monkeypatch, from_here, token, sent, answer
):
    monkeypatch.setattr(http, "is_loopback", lambda _: from_here)
    process.status = lambda: SHOWN
    async with process.serving(token) as browser:
        headers = {} if sent is None else {"authorization": sent.encode("latin-1")}
        assert (await browser.get("/status", headers=headers)).json() == answer
        assert (await browser.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    ("from_here", "sent", "code"),
    [(True, "nothing", 200), (False, "nothing", 403), (False, TOKEN, 200), (False, "another", 403)],
)
async def test_further_pages_are_for_callers_of_this_machine_and_those_with_the_token(
    process, monkeypatch, from_here, sent, code
):
    monkeypatch.setattr(http, "is_loopback", lambda _: from_here)
    pages = {"/rounds": lambda asked: {"after": int(asked["after"])}}
    async with process.serving(TOKEN, pages=pages) as browser:
        headers = {"authorization": f"Bearer {sent}"}
        answer = await browser.get("/rounds?after=7", headers=headers)
        assert answer.status_code == code
        if code == 200:
            assert answer.json() == {"after": 7}
            assert (await browser.get("/rounds?after=x", headers=headers)).status_code == 400


async def test_diloco_status_sends_the_token_that_it_was_given(process, monkeypatch):
    monkeypatch.setattr(http, "is_loopback", lambda _: False)
    process.status = lambda: {**ROLE, **SHOWN}
    async with process.serving(TOKEN) as browser:
        address = f"{browser.base_url.host}:{browser.base_url.port}"
        assert await asyncio.to_thread(fetch_status, address, 20.0) == {**ROLE, **OPEN}
        assert await asyncio.to_thread(fetch_status, address, 20.0, Asker(None, TOKEN)) == {**ROLE, **SHOWN}


async def test_the_token_follows_no_redirect(process):
    came = []

    async def elsewhere(scope: Any, _: Any, send: Any) -> None:
        came.append(scope["path"])
        headers = [(b"location", b"/stolen"), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 302, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    server = HttpListener("127.0.0.1:0", elsewhere)
    address = await server.start()
    try:
        assert await asyncio.to_thread(fetch_status, address, 20.0, Asker(None, TOKEN)) is None
    finally:
        await server.stop()
    assert came == ["/status"]


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("localhost:1", SHOWN),
        ("127.0.0.1", SHOWN),
        ("[::1]:1", SHOWN),
        ("evil.example", OPEN),
        ("evil.example:1", OPEN),
    ],
)
async def test_a_name_that_somebody_leads_to_this_machine_shows_no_more_than_to_strangers(process, host, answer):
    process.status = lambda: SHOWN
    async with process.serving(TOKEN, pages={"/rounds": lambda _: {}}) as browser:
        assert (await browser.get("/status", headers={"host": host})).json() == answer
        rounds = await browser.get("/rounds", headers={"host": host})
        assert rounds.status_code == (200 if answer is SHOWN else 403)


@pytest.mark.parametrize(
    ("address", "security", "refused"),
    [
        ("127.0.0.1:0", {}, False),
        ("[::1]:0", {}, False),
        ("0.0.0.0:0", {}, True),
        ("10.0.0.7:8080", {}, True),
        ("0.0.0.0:0", {"insecure": True}, False),
        ("0.0.0.0:0", {"token_file": "token"}, False),
        ("0.0.0.0:0", {"tls": "certs/shard-0"}, False),
    ],
)
def test_an_address_that_others_reach_must_be_meant(address, security, refused):
    settings = SecuritySettings.model_validate(security)
    if not refused:
        check_http_is_meant("worker.http", address, settings)
        return
    with pytest.raises(ConfigError, match=r"worker\.http = .* is reachable from other machines.*security\.token_file"):
        check_http_is_meant("worker.http", address, settings)


async def test_health_is_answered_however_many_connections_are_held(process):
    async with process.serving() as browser:
        host, port = browser.base_url.host, browser.base_url.port
        crowd = [await asyncio.open_connection(host, port) for _ in range(300)]
        answers = [await browser.get(path, headers={"connection": "close"}) for path in ("/healthz", "/readyz")]
        assert [answer.status_code for answer in answers] == [200, 200]
        for _, writer in crowd:
            writer.close()
