"""The HTTP side of a process: health, readiness, status and metrics."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from diloco_common.errors import ConfigError, InUse
from diloco_common.http import HttpServer


class Process:
    """A process that has something to say."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        Gauge("diloco_test_answer", "For the test.", registry=self.registry).set(42)
        self.is_ready: tuple[bool, str] = (True, "serving")
        self.status: Callable[[], dict[str, Any]] = lambda: {"version": 7}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[httpx.AsyncClient]:
        server = HttpServer(
            "127.0.0.1:0", registry=self.registry, status=lambda: self.status(), ready=lambda: self.is_ready
        )
        address = await server.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as browser:
                yield browser
        finally:
            await server.stop()


@pytest.fixture
def process() -> Process:
    return Process()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, timeout=30))


def test_metrics_are_served_in_the_prometheus_format(process):
    async def scenario():
        async with process.serving() as browser:
            answer = await browser.get("/metrics")

        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        (family,) = text_string_to_metric_families(answer.text)
        assert (family.name, family.samples[0].value) == ("diloco_test_answer", 42)

    run(scenario())


@pytest.mark.parametrize(("is_ready", "code"), [((True, "serving"), 200), ((False, "fragment 3 is not seeded"), 503)])
def test_readiness_says_why(process, is_ready, code):
    async def scenario():
        process.is_ready = is_ready
        async with process.serving() as browser:
            answer = await browser.get("/readyz")

        assert answer.status_code == code
        assert answer.json() == {"ready": is_ready[0], "reason": is_ready[1]}

    run(scenario())


def test_a_process_that_is_not_ready_is_still_alive(process):
    async def scenario():
        process.is_ready = (False, "starting")
        async with process.serving() as browser:
            assert (await browser.get("/healthz")).status_code == 200

    run(scenario())


def test_status_is_json_also_when_a_loss_has_diverged(process):
    async def scenario():
        process.status = lambda: {"loss": float("nan"), "losses": [1.5, float("inf")], "version": 7}
        async with process.serving() as browser:
            answer = await browser.get("/status?verbose=1")

        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == {"loss": None, "losses": [1.5, None], "version": 7}

    run(scenario())


def test_a_status_that_fails_is_answered_and_the_server_goes_on(process):
    async def scenario():
        process.status = lambda: {"impossible": 1 // 0}
        async with process.serving() as browser:
            assert (await browser.get("/status")).status_code == 500
            assert (await browser.get("/healthz")).status_code == 200

    run(scenario())


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
def test_other_paths_and_methods_are_refused(process, method, path, code):
    async def scenario():
        async with process.serving() as browser:
            answer = await browser.request(method, path)

        assert answer.status_code == code
        if code == 405:
            assert answer.headers["allow"] == "GET, HEAD"
        if method != "HEAD" and code != 200:
            assert "error" in answer.json()

    run(scenario())


def test_garbage_bytes_do_not_stop_the_server(process):
    async def scenario():
        async with process.serving() as browser:
            reader, writer = await asyncio.open_connection(browser.base_url.host, browser.base_url.port)
            writer.write(b"\x00\xff" * 4096)
            await reader.read()  # it hangs up
            writer.close()

            assert (await browser.get("/healthz")).status_code == 200

    run(scenario())


def test_a_port_in_use_is_refused_by_name(process):
    async def scenario():
        async with process.serving() as browser:
            taken = f"127.0.0.1:{browser.base_url.port}"
            second = HttpServer(taken, registry=process.registry, status=dict, ready=lambda: (True, ""))
            with pytest.raises(InUse, match=taken):
                await second.start()

    run(scenario())


def test_a_bad_address_is_a_configuration_error(process):
    server = HttpServer("nowhere", registry=process.registry, status=dict, ready=lambda: (True, ""))

    with pytest.raises(ConfigError):
        run(server.start())  # type: ignore[arg-type]


def test_the_port_is_free_after_stopping_and_stopping_twice_is_fine(process):
    async def scenario():
        first = HttpServer("127.0.0.1:0", registry=process.registry, status=dict, ready=lambda: (True, ""))
        address = await first.start()
        await first.stop()
        await first.stop()

        second = HttpServer(address, registry=process.registry, status=dict, ready=lambda: (True, ""))
        assert await second.start() == address
        await second.stop()

    run(scenario())


def test_signals_stay_with_the_process_that_hosts_the_server(process):
    async def scenario():
        interrupted = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
        async with process.serving() as browser:
            os.kill(os.getpid(), signal.SIGINT)
            await interrupted.wait()

            assert (await browser.get("/healthz")).status_code == 200

    run(scenario())
