"""HTTP over TLS: health is for everybody, figures are for observers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from certificates import Certificates
from diloco_common.observe.http import HttpServer
from diloco_common.observe.http_listener import TlsDoor
from diloco_common.trust.files import TlsFiles, TlsFolder, read_folder
from diloco_deploy.cluster.asking import Asker, NoAnswer, fetch_all
from diloco_deploy.cluster.asking import ask as ask_shard
from waiting import DEADLINE_S


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
