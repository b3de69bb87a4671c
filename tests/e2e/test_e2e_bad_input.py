"""What people get wrong, in processes: one clear line, no traceback, and the exit code of faults.md.

What else can be typed wrong is in unit/test_mistakes.py, without an interpreter that takes seconds to start.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from diloco_common.wire.addresses import Endpoints
from diloco_demo.cli import main as worker_main
from diloco_server.cli import main
from processes import LocalCluster, Process, http_get, run_module, until


@pytest.mark.parametrize("program", [["diloco_deploy", "up"], ["diloco_server"], ["diloco_demo"]], ids=lambda p: p[0])
def test_a_process_ends_with_one_line_and_its_exit_code(program: list[str]) -> None:
    ended = run_module(*program, "--set=sync.quorm=2", own_interpreter=True)
    assert_one_line(ended.returncode, ended.stderr, 2, "sync.quorm", "did you mean", "quorum")


@pytest.mark.parametrize("flag", ["--listen", "--http"])
def test_a_port_in_use_names_who_has_it(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        code = main([f"{flag}={taken}"])
    assert_one_line(code, capsys.readouterr().err, 4, taken, f"process {os.getpid()}")


@pytest.mark.parametrize(("program", "arguments"), [(main, []), (worker_main, ["--shards=127.0.0.1:1"])])
def test_an_open_http_address_wants_certificates(program, arguments: list[str], capsys) -> None:
    code = program([*arguments, "--http=0.0.0.0:0"])
    said = capsys.readouterr().err
    assert_one_line(code, said, 2, ".http = 0.0.0.0", "security.token_file", "security.insecure")


def test_a_worker_that_comes_before_its_shards_waits_and_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        absent = f"127.0.0.1:{closed.getsockname()[1]}"
    with LocalCluster(tmp_path / "run") as cluster:
        worker = cluster.add_worker("early")
        cluster.shards.append(Process("shard-0", "nobody", list, cluster.folder))  # stands where a shard will be
        cluster.shards[0].known_at(Endpoints("shard", "shard-0", 0, absent, ""))
        worker.start()

        until(lambda: f"no connection, trying again shard={absent}" in worker.said(), "the first line about it")

        assert worker.status()["state"] == "joining"
        code, text = http_get(worker.endpoints.http, "/readyz")
        assert (code, json.loads(text)["reason"]) == (503, f"no answer from {absent}")
        assert worker.alive
        assert "Traceback" not in worker.said()


def assert_one_line(found: int, said: str, code: int, *words: str) -> None:
    """A command ended with this code and one line that has these words."""
    assert found == code, said
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1, said
    for word in words:
        assert word in said
