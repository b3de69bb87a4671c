"""The `diloco` command: bad input is one line, and the files that say where a process answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco_chaos import command as chaos
from diloco_common.program import main
from diloco_common.settings import Settings
from diloco_common.wire.addresses import Endpoints, read_address, write_address
from diloco_deploy.cluster.record import ClusterRecord
from diloco_deploy.run.folder import ClusterFolder, Outputs


def test_status_of_a_cluster_that_starts_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ClusterFolder(tmp_path, Outputs())
    with files.owned():
        ClusterRecord.of(Settings()).write(tmp_path)
        (tmp_path / "run" / "lock").write_text(str(os.getppid()))  # of another process than the one that asks
        assert main(["status", "--folder", str(tmp_path)]) == 5
        assert "is starting" in capsys.readouterr().err
    assert main(["status", "--folder", str(tmp_path)]) == 5
    assert "no cluster is running" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["status"], ["logs"], ["scale", "--workers", "3"]])
def test_a_cluster_is_found_by_the_settings_of_its_run(argv, tmp_path, capsys) -> None:
    (tmp_path / "run.toml").write_text('[cluster]\nfolder = "elsewhere"\n')
    assert main([*argv, "--config", str(tmp_path / "run.toml")]) != 0
    assert "elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--every", "x"], "--every x: must be seconds, from 0.1 to 10000, such as 5s"),
        (["--minutes", "0"], "--minutes 0: must be minutes, from 0.01 to 10000"),
        (["--dead", "nan"], "--dead nan: must be a share, from 0 to 0.9"),
        (["--timeline", "x.gif"], "--timeline x.gif: give a name that ends with .png or .svg"),
        (["--baseline", "/does/not/exist"], "/does/not/exist is not a result of chaos"),
        (["--workers", "2", "--set", "sync.quorum=3"], "sync.quorum (3) is above cluster.workers (2)"),
    ],
)
def test_bad_input_of_chaos_is_one_line_and_exit_code_2(argv, says, capsys) -> None:
    network = Path("/proc/self/ns/net").readlink()
    assert chaos.main(argv) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    assert Path("/proc/self/ns/net").readlink() == network, "chaos enters a network namespace, which is not done yet"


def test_an_address_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.json"
    assert read_address(path) is None
    written = write_address(path, "shard", "shard-0", grpc="127.0.0.1:1", http="127.0.0.1:2")
    assert read_address(path) == written == Endpoints("shard", "shard-0", os.getpid(), "127.0.0.1:1", "127.0.0.1:2")
    assert [one.name for one in tmp_path.iterdir()] == ["shard-0.json"]
