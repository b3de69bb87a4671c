"""The live page over HTTP: who gets it, what it is allowed to load, and what it tells while it goes on."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from certificates import Certificates
from diloco_common.errors import ConfigError
from diloco_common.settings import SecuritySettings
from diloco_deploy.cluster.asking import ShardReply
from diloco_deploy.web import command, live_page
from diloco_deploy.web.live_page import LivePage, PageCredentials, given
from secret_files import secret_file
from waiting import DEADLINE_S

NOWHERE = "127.0.0.1:1"
TOKEN = "a-secret-that-nobody-shows"


@asynccontextmanager
async def served(page: LivePage, **of_client: Any) -> AsyncIterator[tuple[str, httpx.AsyncClient]]:
    """The printed address of a page, and a client of it."""
    url = await page.start()
    try:
        async with httpx.AsyncClient(
            base_url=url.partition("#")[0], trust_env=False, timeout=DEADLINE_S, **of_client
        ) as client:
            yield url, client
    finally:
        await page.stop()


def open_page() -> LivePage:
    return command.page_of("127.0.0.1:0", given([NOWHERE]), SecuritySettings(), None)


def guarded_page(folder: Path) -> LivePage:
    security = SecuritySettings(token_file=secret_file(folder / "token", TOKEN))
    return command.page_of("127.0.0.1:0", given([NOWHERE]), security, None)


def not_json(word: str) -> None:
    raise AssertionError(f"a browser cannot read {word}")


async def first_state(client: httpx.AsyncClient) -> dict[str, Any]:
    async with client.stream("GET", "/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                return dict(json.loads(line.removeprefix("data: "), parse_constant=not_json))
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/static/vendor/uPlot.iife.min.js", "/learners", "/nothing"])
async def test_no_answer_lets_the_browser_load_from_elsewhere(path):
    async with served(open_page()) as (_, client):
        policy = (await client.get(path)).headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy


async def test_where_the_run_has_a_token_the_page_asks_for_a_key(tmp_path):
    async with served(guarded_page(tmp_path)) as (url, client):
        assert TOKEN not in url, "the secret of the run is not printed"
        closed = await client.get("/")
        assert (closed.status_code, "asks for a key" in closed.text) == (401, True)
        assert [(await client.get(path)).status_code for path in ("/events", "/learners")] == [401, 401]
        assert (await client.post("/enter", content="wrong")).status_code == 403

        assert (await client.post("/enter", content=url.partition("#key=")[2])).status_code == 204
        assert "Does it train?" in (await client.get("/")).text
        assert (await client.get("/learners")).status_code == 200


async def test_the_shared_token_opens_the_page_and_the_cookie_cannot_be_read_by_scripts(tmp_path):
    async with served(guarded_page(tmp_path)) as (_, client):
        assert (await client.get("/learners", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 200
        given = (await client.post("/enter", content=TOKEN)).headers["set-cookie"]
        assert "HttpOnly" in given
        assert "SameSite=strict" in given
        assert TOKEN not in given


async def test_a_body_without_end_is_cut_off(tmp_path):
    async with served(guarded_page(tmp_path)) as (_, client):
        assert (await client.post("/enter", content=b"x" * 100_000)).status_code == 413


@pytest.mark.parametrize(
    "answer",
    [
        ShardReply(0.0, {"role": "shard", "learners": [{"id": "x"}]}, None),
        RecursionError("nested"),
        OverflowError("large"),
    ],
)
async def test_a_shard_that_answers_nonsense_is_away_and_is_asked_again(monkeypatch, answer):
    asked = 0

    def ask_instead(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(live_page, "ask", ask_instead)
    monkeypatch.setattr(live_page, "EVERY_S", 0.01)

    async with served(open_page()) as (_, client):
        while "makes no sense" not in (await first_state(client))["shards"][0]["why_not"] or asked < 3:
            pass
        assert (await client.get("/learners")).json()["total"] == 0


def test_a_renewal_that_cannot_be_used_yet_leaves_the_page_with_what_it_has(tmp_path, monkeypatch):
    run = Certificates(tmp_path / "certs")
    own = PageCredentials(run.issue("observer/page"), None)
    before = own.asker()
    run.issue("observer/page")
    with monkeypatch.context() as patched:
        patched.setattr(live_page, "Asker", half_written)
        assert own.asker() is before
    assert own.asker() is not before


def half_written(*_: Any) -> None:
    raise ConfigError("the files do not fit together")


@pytest.mark.parametrize(
    ("who", "code"), [(None, 401), ("observer/eve", 200), ("learner/a", 401), ("observer/revoked", 401)]
)
async def test_beyond_this_machine_it_is_served_over_tls_and_an_observers_certificate_opens_it(tmp_path, who, code):
    run = Certificates(tmp_path / "certs")
    own = run.issue("observer/page")
    if who == "observer/revoked":
        run.issue(who)
        run.revoke(run.serials[who])
    security = SecuritySettings(revoked=run.deny_list if run.deny_list.exists() else None)
    page = command.page_of("0.0.0.0:0", given([NOWHERE]), security, own, certificate=run.issue("shard/0"))
    context = ssl.create_default_context(cafile=str(run.authority.folder / "ca.pem"))
    context.check_hostname = False
    if who is not None:
        folder = run.authority.folder / who.replace("/", "-")
        folder = folder if folder.exists() else run.issue(who)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")

    async with served(page, verify=context) as (url, client):
        assert url.startswith("https://127.0.0.1:")
        assert (await client.get("/")).status_code == code


def test_other_machines_get_nothing_without_consent():
    with pytest.raises(ConfigError, match=r"--listen = 0\.0\.0\.0:7171 is reachable from other machines"):
        command.page_of("0.0.0.0:7171", given([NOWHERE]), SecuritySettings(), None)
