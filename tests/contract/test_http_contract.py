"""The HTTP side of a process: health for everybody; status and metrics, over TLS for observers alone."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from certificates import Certificates
from diloco_common.errors import ConfigError, InUse
from diloco_common.observe import http
from diloco_common.observe.http import HttpServer, check_http_is_meant
from diloco_common.observe.http_listener import HttpListener, TlsDoor
from diloco_common.settings import SecuritySettings
from diloco_common.trust.files import TlsFiles, TlsFolder, read_folder
from diloco_deploy.cluster.asking import Asker, NoAnswer, fetch_all
from diloco_deploy.cluster.asking import ask as ask_shard
from statuses import fetch_status
from waiting import DEADLINE_S, until_async


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


async def test_without_free_files_a_server_waits_and_does_not_spin(process):
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with process.serving() as browser:
        with socket.socket() as caller, tempfile.TemporaryFile() as next_file:
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_file.fileno() + 1, limits[1]))
            try:
                caller.connect((browser.base_url.host, browser.base_url.port))
                await until_async(lambda: failures, "the server to find no file for the caller")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(failures) <= 2, "it waits a second before it tries again"
        assert (await browser.get("/healthz")).status_code == 200


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


@asynccontextmanager
async def serving(folder: Path, may_look: Callable[[Any], bool] = lambda _: True) -> AsyncIterator[str]:
    """A shard's HTTP side with these certificates; gives its address."""
    registry = CollectorRegistry()
    Gauge("diloco_test_answer", "For the test.", registry=registry).set(42)
    files = TlsFolder(folder, needs_pair=True)

    def newest() -> TlsFiles:
        files.refresh()
        return files.files

    server = HttpServer(
        "127.0.0.1:0", registry=registry, status=lambda: {"epoch": 7}, ready=lambda: (True, "serving"),
        door=TlsDoor(newest, may_look),
    )  # fmt: skip
    try:
        yield await server.start()
    finally:
        await server.stop()


async def ask(address: str, path: str, run: Certificates, own: Path | None = None) -> httpx.Response:
    context = trusting(run)
    if own is not None:
        context.load_cert_chain(own / "cert.pem", own / "key.pem")
    async with httpx.AsyncClient(verify=context, trust_env=False, timeout=DEADLINE_S) as browser:
        return await browser.get(f"https://{address}{path}")


async def test_whoever_asks_hears_that_a_certificate_has_expired(run):
    observer = Asker(run.issue("observer/me"))
    over: dict[str, str] = {}
    async with serving(run.issue("shard/0", begins=timedelta(days=-3))) as address:
        assert await asyncio.to_thread(fetch_all, {"shard-0": address}, DEADLINE_S, observer, over) == {}
        with pytest.raises(NoAnswer) as silence:
            await asyncio.to_thread(ask_shard, observer, address, 0, 0)
    assert over == {"shard-0": "its certificate, or the authority's, has expired"}
    assert silence.value.code == "EXPIRED"


@pytest.mark.parametrize(
    ("who", "code"),
    [
        (None, 403),
        ("learner/a", 403),
        ("observer/prometheus", 200),
        ("admin/eve", 200),
        ("shard/0", 200),
        ("shard/1", 403),
    ],
)
@pytest.mark.parametrize("path", ["/status", "/metrics"])
async def test_figures_are_for_observers_admins_and_the_process_itself(run, path, who, code):
    async with serving(run.issue("shard/0")) as address:
        own = None if who is None else run.issue(who) if who != "shard/0" else run.authority.folder / "shard-0"
        answer = await ask(address, path, run, own)
        assert answer.status_code == code
        if code == 403:
            assert "diloco certs issue observer/" in answer.json()["error"]
        elif path == "/status":
            assert answer.json() == {"epoch": 7}, "whoever may look sees all"


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_ask_for_health_without_a_certificate(run, path):
    async with serving(run.issue("shard/0")) as address:
        assert (await ask(address, path, run)).status_code == 200


async def test_a_certificate_of_another_run_or_authority_shows_nothing(run, tmp_path):
    own, foreign = run.issue("shard/0"), Certificates(tmp_path / "foreign").issue("observer/x")
    run.authority.run_id = "other"
    other = run.issue("observer/x")
    async with serving(own) as address:
        assert (await ask(address, "/status", run, other)).status_code == 403
        with pytest.raises(httpx.TransportError):
            await ask(address, "/healthz", run, foreign)


async def test_an_observer_that_is_revoked_sees_no_more(run):
    revoked: set[str] = set()
    observer = run.issue("observer/x")
    async with serving(run.issue("shard/0"), lambda proof: proof.serial not in revoked) as address:
        assert (await ask(address, "/metrics", run, observer)).status_code == 200
        revoked.add(run.serials["observer/x"])
        assert (await ask(address, "/metrics", run, observer)).status_code == 403


async def test_a_renewed_certificate_is_shown_from_the_next_handshake_on(run):
    own = run.issue("shard/0")

    async def serial(address: str) -> int:
        _reader, writer = await asyncio.open_connection(*address.split(":"), ssl=trusting(run))
        shown = writer.get_extra_info("ssl_object").getpeercert()
        writer.close()
        return int(shown["serialNumber"], 16)

    async with serving(own) as address:
        first = await serial(address)
        run.issue("shard/0")
        assert await serial(address) == int(run.serials["shard/0"], 16) != first
        (own / "key.pem").write_text("damaged")
        assert await serial(address) == int(run.serials["shard/0"], 16), "what was read before holds on"


async def test_a_caller_whose_certificate_has_expired_does_not_get_in(run):
    async with serving(run.issue("shard/0")) as address:
        with pytest.raises(httpx.TransportError):
            await ask(address, "/metrics", run, run.issue("observer/x", begins=timedelta(days=-2)))


async def test_a_learner_is_scraped_under_a_name_that_nobody_can_dial(run):
    """Prometheus checks a name; a learner has none of its own, and its certificate must not do for a shard."""
    own = run.issue("learner/a")
    async with serving(own) as address:
        context = trusting(run)
        for name, is_taken in (("learner.diloco.invalid", True), ("localhost", False), ("ps-0", False)):
            try:
                _, writer = await asyncio.open_connection(*address.split(":"), ssl=context, server_hostname=name)
                writer.close()
                taken = True
            except ssl.SSLCertVerificationError:
                taken = False
            assert taken is is_taken, name

    assert read_folder(own).subject is not None


def trusting(run: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(run.authority.folder / "ca.pem"))
