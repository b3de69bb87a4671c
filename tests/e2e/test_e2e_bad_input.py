"""What people get wrong, typed as they would: one clear line, no traceback, and the exit code of faults.md.

The commands run in this process, but for one of each program: an interpreter takes seconds to start.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import diloco_demo.cli
import diloco_deploy.cli
import diloco_server.cli
from diloco_common.wire.addresses import Endpoints
from diloco_deploy.show.status import ANSWER_WITHIN_S
from processes import LocalCluster, Process, http_get, run_module, until

Ended = subprocess.CompletedProcess[str]
MAINS = {
    "diloco_deploy": diloco_deploy.cli.main, "diloco_server": diloco_server.cli.main,
    "diloco_demo": diloco_demo.cli.main,
}  # fmt: skip


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Runs a program in this process, and says how it has ended."""
    for name in [name for name in os.environ if name.startswith("DILOCO_")]:
        monkeypatch.delenv(name)

    def run(program: str, *arguments: str) -> Ended:
        capsys.readouterr()
        code = MAINS[program](arguments)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess([program, *arguments], code, out, err)

    return run


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("[sync]\nquorum = 1\nmerge = rda\n")
    return path


@pytest.fixture
def deaf() -> Iterator[str]:
    """The address of somebody who takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def absent() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"127.0.0.1:{closed.getsockname()[1]}"


WORDS = {"diloco_deploy": ["up"], "diloco_server": [], "diloco_demo": []}


@pytest.mark.parametrize("program", WORDS)
def test_a_process_ends_with_that_line_and_its_exit_code(program: str) -> None:
    ended = run_module(program, *WORDS[program], "--set=sync.quorm=2", own_interpreter=True)
    assert_one_line(ended, 2, "sync.quorm", "did you mean", "quorum")


@pytest.mark.parametrize("program", WORDS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set=sync.quorm=2"], ["sync.quorm", "did you mean", "quorum"]),
        (["--set=lease.lease_s=1"], ["lease_s (1 s)", "two heartbeats"]),
        (["--config=absent.toml"], ["absent.toml"]),
    ],
)
def test_wrong_settings_are_refused_at_the_door(command, program: str, arguments: list[str], words: list[str]) -> None:
    assert_one_line(command(program, *WORDS[program], *arguments), 2, *words)


def test_an_error_in_toml_names_file_and_line(command, toml: Path) -> None:
    assert_one_line(command("diloco_server", f"--config={toml}"), 2, f"{toml}:3")


def test_a_quorum_above_the_workers_is_refused(command, tmp_path: Path) -> None:
    ended = command("diloco_deploy", "up", "--workers=1", "--set=sync.quorum=2", f"--folder={tmp_path}")
    assert_one_line(ended, 2, "sync.quorum (2)", "cluster.workers (1)")


@pytest.mark.parametrize("flag", ["--listen", "--http"])
def test_a_port_in_use_names_who_has_it(command, flag: str, deaf: str) -> None:
    assert_one_line(command("diloco_server", f"{flag}={deaf}"), 4, deaf, f"process {os.getpid()}")


def test_an_open_address_wants_certificates(command) -> None:
    ended = command("diloco_server", "--listen=0.0.0.0:0")
    assert_one_line(ended, 2, "0.0.0.0", "diloco certs init", "security.tls", "security.insecure")


@pytest.mark.parametrize("arguments", [["diloco_server"], ["diloco_demo", "--shards=127.0.0.1:1"]])
def test_an_open_http_address_wants_one_too(command, arguments: list[str]) -> None:
    ended = command(*arguments, "--http=0.0.0.0:0")
    assert_one_line(ended, 2, ".http = 0.0.0.0", "security.token_file", "security.insecure")


def test_what_a_command_cannot_do_without_is_named(command) -> None:
    assert_one_line(command("diloco_demo"), 2, "--shards")
    assert_one_line(command("diloco_deploy", "pull", "--shards=127.0.0.1:9"), 2, "--out", "[BAD_CONFIG]")


def test_data_that_is_not_there_is_refused(command, deaf: str, tmp_path: Path) -> None:
    ended = command("diloco_demo", f"--shards={deaf}", f"--data={tmp_path / 'absent'}")
    assert_one_line(ended, 3, "absent")


def test_status_of_nobody_ends_within_two_seconds(command, deaf: str, absent: str, tmp_path: Path) -> None:
    assert ANSWER_WITHIN_S < 2.0
    ended = command("diloco_deploy", "status", f"--http={deaf},{absent}")
    assert_one_line(ended, 5, deaf, absent, "diloco up")
    assert_one_line(command("diloco_deploy", "status", f"--folder={tmp_path}"), 5, str(tmp_path), "diloco up")


def test_a_worker_that_comes_before_its_shards_waits_and_says_so(absent: str, tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "run") as cluster:
        worker = cluster.add_worker("early")
        cluster.shards.append(absent_shard(cluster.folder, absent))
        worker.start()

        until(lambda: f"no connection, trying again shard={absent}" in worker.said(), "the first line about it")

        assert worker.status()["state"] == "joining"
        code, text = http_get(worker.endpoints.http, "/readyz")
        assert (code, json.loads(text)["reason"]) == (503, f"no answer from {absent}")
        assert worker.alive
        assert "Traceback" not in worker.said()


def absent_shard(folder: Path, address: str) -> Process:
    """Stands where a shard will be."""
    shard = Process("shard-0", "nobody", list, folder)
    shard.known_at(Endpoints("shard", shard.name, 0, address, ""))
    return shard


def assert_one_line(ended: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """The command ended with this code and one line that has these words."""
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr
