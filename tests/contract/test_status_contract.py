"""`diloco status` and `diloco record` ask processes that answer, that do not, and that answer nonsense."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from builders import make_settings
from diloco_common.command import main
from diloco_common.observe.http import HttpServer
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_common.wire.addresses import write_address
from diloco_deploy import status
from diloco_deploy.cluster.asking import fetch_all
from diloco_server.core.ledger import ANSWER_MAX, Merged, VersionCommitted
from diloco_server.shell.host import ShardHost
from diloco_server.shell.server import real_world
from diloco_server.shell.status import record_since
from diloco_server.storage.store import MemoryStore
from statuses import fetch_status
from waiting import DEADLINE_S

SHARD = {
    "role": "shard", "name": "shard-1", "index": 1, "count": 2, "ready": True, "uptime_s": 12.0, "tokens_merged": 42,
    "fragments": [{"id": 0, "version": 7}],
}  # fmt: skip


class Answering(ThreadingHTTPServer):
    """Answers every GET with the same bytes; `hold` lets them wait."""

    def __init__(self, body: bytes) -> None:
        self.hold = threading.Event()
        self.hold.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.hold.wait(30)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


@pytest.fixture
def shard() -> Iterator[Answering]:
    with Answering(json.dumps(SHARD).encode()) as server:
        yield server
        server.hold.set()
        server.shutdown()


@pytest.fixture
def nobody() -> str:
    server = Answering(b"")
    server.shutdown()
    server.server_close()
    return server.address


def test_status_gives_up_on_a_frozen_process_within_two_seconds(shard: Answering) -> None:
    """All that it waits for; a busy machine takes longer for the rest."""
    shard.hold.clear()
    assert main(["status", "--http", shard.address]) == 5
    assert status.ANSWER_WITHIN_S < 2.0


@pytest.mark.parametrize("terminal", [False, True])
def test_watch_says_how_far_the_run_is_and_that_nobody_answers_any_more(shard: Answering, terminal: bool) -> None:
    screens = io.StringIO()
    looks = 0

    def wait(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise KeyboardInterrupt
        shard.shutdown()
        shard.server_close()

    console = Console(file=screens, force_terminal=terminal, width=100, color_system=None)
    with pytest.raises(KeyboardInterrupt):
        status.watch_status(status.Where(Path(), [shard.address]), console=console, wait=wait)
    before, _, after = screens.getvalue().partition("nobody has answered for 0:")
    assert "0:12  running  merged 42" in before
    assert ("these figures are older" in after) == terminal


def test_status_with_one_shard_of_two_down_shows_the_other(tmp_path, shard, nobody, capsys, monkeypatch) -> None:
    (tmp_path / "run").mkdir()
    write_address(tmp_path / "run" / "shard-0.json", "shard", "shard-0", grpc="x:1", http=nobody)
    write_address(tmp_path / "run" / "shard-1.json", "shard", "shard-1", grpc="x:2", http=shard.address)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(status, "ANSWER_WITHIN_S", DEADLINE_S)  # who is gone refuses at once
    assert main(["status", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert any("shard-0" in one and "no answer" in one for one in said.splitlines())
    assert any("shard-1" in one and "7-7" in one for one in said.splitlines())

    assert main(["status", "--folder", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["answered"]) for one in found["members"]] == [("shard-0", False), ("shard-1", True)]
    assert found["totals"]["tokens_merged"] == 42


def test_our_own_processes_are_never_asked_through_a_proxy(shard, nobody, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://{nobody}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert fetch_status(shard.address, DEADLINE_S) == SHARD


def test_one_silent_member_does_not_hide_the_others(shard: Answering, nobody: str) -> None:
    with Answering(b"") as frozen:
        frozen.hold.clear()
        found = fetch_all({"frozen": frozen.address, "nobody": nobody, "shard-1": shard.address}, 5.0)
        frozen.hold.set()
        frozen.shutdown()
    assert found == {"shard-1": SHARD}


EPOCH = 7
VERSIONS = ANSWER_MAX
"""With two learners each: two answers' worth."""
WHOSE = (Merged("ann", tokens=30, share=0.75, kept=1.0), Merged("bob", tokens=10, share=0.25, kept=0.8))
LEFT_OUT = Merged("carl", tokens=10, share=0.0, kept=1.0)


async def asked(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, str]:
    """The address of a shard with these versions, and what the command says of it."""
    metrics, log = ShardMetrics(), Log("test")
    host = ShardHost(make_settings(), MemoryStore(EPOCH), real_world(), metrics=metrics, log=log, clock=lambda: 0.0)
    for version in range(1, VERSIONS + 1):
        whose = (*WHOSE, LEFT_OUT) if version == VERSIONS else WHOSE
        host.shard.ledger.note(VersionCommitted(0, version, len(WHOSE), 40, 1.0, merged=whose), 0.0)

    def page(query: dict[str, str]) -> dict[str, object]:
        return record_since(host, int(query["epoch"]), int(query["after"]))

    server = HttpServer(
        "127.0.0.1:0", registry=metrics.registry, status=dict, ready=lambda: (True, ""), pages={"/record": page}
    )
    address = await server.start()
    try:
        assert await asyncio.to_thread(main, ["record", "--http", address, *options]) == 0
    finally:
        await server.stop()
    return address, capsys.readouterr().out


async def test_json_has_a_line_for_each_contribution_to_each_version(capsys: pytest.CaptureFixture[str]) -> None:
    address, said = await asked(capsys, "--json")
    lines = [json.loads(line) for line in said.splitlines()]
    assert [(one["version"], one["learner"]) for one in lines] == [
        *((version, one.learner_id) for version in range(1, VERSIONS + 1) for one in WHOSE),
        (VERSIONS, LEFT_OUT.learner_id),
    ]
    assert lines[1].pop("at") > 0
    assert lines[1] == {
        "shard": address, "epoch": EPOCH, "fragment": 0, "version": 1, "learner": "bob", "tokens": 10, "share": 0.25,
        "kept": 0.8,
    }  # fmt: skip


def test_a_shard_that_does_not_answer_is_an_error_and_no_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--http", "127.0.0.1:1"]) == 5
    assert capsys.readouterr().out == ""
