"""`diloco --help`, `--version` and `diloco status`: quick, and clear about who does not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from diloco_common.endpoints import Endpoints, dialable, read_address, write_address, write_json
from diloco_deploy.cli import main
from diloco_deploy.polling import Poller, fetch_all, fetch_status

SHARD = {"role": "shard", "name": "shard-1", "ready": True, "tokens_merged": 42, "fragments": [{"id": 0, "version": 7}]}


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
        threading.Thread(target=self.serve_forever, daemon=True).start()

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
    """An address where nobody listens."""
    server = Answering(b"")
    server.shutdown()
    server.server_close()
    return server.address


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["up", "--help"],
        ["chaos", "--every", "x"],
        ["status", "--http", "127.0.0.1:1"],
        ["--version"],
        ["checkpoint", "--help"],
        ["restore", "--help"],
    ],
)
def test_quick_commands_import_neither_torch_nor_grpc(argv: list[str]) -> None:
    program = (
        "import sys\n"
        "from diloco_deploy.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "slow = {'torch', 'grpc', 'numpy'} & sys.modules.keys()\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, env=environ, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_status_without_a_cluster_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--folder", str(tmp_path)]) == 5
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert "[CANNOT_CONNECT]" in said


def test_status_when_nobody_answers(nobody: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--http", nobody]) == 5
    assert f"nobody answers at {nobody}" in capsys.readouterr().err


def test_status_gives_up_on_a_frozen_process_within_two_seconds(shard: Answering) -> None:
    shard.hold.clear()
    started = time.monotonic()
    assert main(["status", "--http", shard.address]) == 5
    assert time.monotonic() - started < 2.0  # the promise itself, not a guess about speed


def test_status_with_one_shard_of_two_down_shows_the_other(
    tmp_path: Path, shard: Answering, nobody: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    write_address(tmp_path / "run" / "shard-0.json", "shard", "shard-0", grpc="x:1", http=nobody)
    write_address(tmp_path / "run" / "shard-1.json", "shard", "shard-1", grpc="x:2", http=shard.address)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["status", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert any("shard-0" in one and "no answer" in one for one in said.splitlines())
    assert any("shard-1" in one and "7-7" in one for one in said.splitlines())

    assert main(["status", "--folder", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["answered"]) for one in found["members"]] == [("shard-0", False), ("shard-1", True)]
    assert found["totals"]["tokens_merged"] == 42


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["up", "--shards", "0"], "cluster.shards = 0 (--shards): must be a whole number from 1 to 64"),
        (["up", "--tokens", "many"], "run.tokens = many (--tokens): must be a whole number"),
        (["up", "--set", "sync.quorm=1"], "did you mean sync.quorum?"),
        (["up", "--workers", "2", "--set", "sync.quorum=3"], "sync.quorum (3) is above cluster.workers (2)"),
        (["up", "--config", "/does/not/exist.toml"], "/does/not/exist.toml: no such file"),
        (["upp"], "invalid choice: 'upp'"),
        (["chaos", "--every", "x"], "argument --every: x: must be seconds, from 0.1 to 10000, such as 5s"),
        (["chaos", "--minutes", "0"], "argument --minutes: 0: must be minutes, from 0.01 to 10000"),
        (["chaos", "--dead", "nan"], "argument --dead: nan: must be a share, from 0 to 0.9"),
        (["chaos", "--timeline", "x.gif"], "--timeline x.gif: give a name that ends with .png or .svg"),
        (["chaos", "--baseline", "/does/not/exist"], "/does/not/exist is not a result of `diloco chaos`"),
        (["chaos", "--workers", "2", "--set", "sync.quorum=3"], "sync.quorum (3) is above cluster.workers (2)"),
        (["status", "--jsn"], "unrecognized arguments: --jsn"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    network = Path("/proc/self/ns/net").readlink()
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    assert Path("/proc/self/ns/net").readlink() == network, "chaos enters a network namespace, which is not done yet"


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b'{"role": "something else"}', b"\xff"])
def test_who_answers_nonsense_does_not_answer(body: bytes) -> None:
    with Answering(body) as server:
        assert fetch_status(server.address, 5.0) is None
        server.shutdown()


def test_our_own_processes_are_never_asked_through_a_proxy(
    shard: Answering, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{nobody}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert fetch_status(shard.address, 5.0) == SHARD


def test_one_silent_member_does_not_hide_the_others(shard: Answering, nobody: str) -> None:
    with Answering(b"") as frozen:
        frozen.hold.clear()
        found = fetch_all({"frozen": frozen.address, "nobody": nobody, "shard-1": shard.address}, 1.0)
        frozen.hold.set()
        frozen.shutdown()
    assert found == {"shard-1": SHARD}


def test_the_poller_forgets_who_is_not_asked_any_more(shard: Answering) -> None:
    poller = Poller(every_s=0.01)
    poller.ask({"shard-1": shard.address})
    poller.start()
    deadline = time.monotonic() + 30
    while not (answers := poller.take()):
        assert time.monotonic() < deadline
    poller.stop()
    assert answers == {"shard-1": SHARD}


def test_an_address_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.json"
    assert read_address(path) is None
    written = write_address(path, "shard", "shard-0", grpc="127.0.0.1:1", http="127.0.0.1:2")
    assert read_address(path) == written == Endpoints("shard", "shard-0", os.getpid(), "127.0.0.1:1", "127.0.0.1:2")
    assert [one.name for one in tmp_path.iterdir()] == ["shard-0.json"]


@pytest.mark.parametrize("value", [None, [], {}, {"role": "shard"}, {"a": 1}])
def test_a_file_that_is_no_address_is_none(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path / "x.json", value)
    assert read_address(tmp_path / "x.json") is None


@pytest.mark.parametrize(
    ("bound", "dialed"),
    [("0.0.0.0:5", "127.0.0.1:5"), ("[::]:5", "127.0.0.1:5"), ("10.0.0.1:5", "10.0.0.1:5"), ("[::1]:5", "[::1]:5")],
)
def test_a_wildcard_is_dialled_over_loopback(bound: str, dialed: str) -> None:
    assert dialable(bound) == dialed
