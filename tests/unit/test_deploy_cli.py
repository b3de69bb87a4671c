"""The `diloco` command: bad input is one line, and the files that say where a process answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco_common.command import main
from diloco_common.settings import Settings
from diloco_common.wire.addresses import Endpoints, read_address, write_address
from diloco_deploy.cluster.roll_call import ClusterRecord
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


def test_an_address_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.json"
    assert read_address(path) is None
    written = write_address(path, "shard", "shard-0", grpc="127.0.0.1:1", http="127.0.0.1:2")
    assert read_address(path) == written == Endpoints("shard", "shard-0", os.getpid(), "127.0.0.1:1", "127.0.0.1:2")
    assert [one.name for one in tmp_path.iterdir()] == ["shard-0.json"]
