"""What `diloco up` refuses before it starts anything, and which ports it gives to whom."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco_common.errors import ConfigError, InUse
from diloco_common.settings import Settings
from diloco_common.settings_loader import load
from diloco_deploy.run.children import Programs, nth_port
from diloco_deploy.run.folder import Files, Outputs
from diloco_deploy.run.up import bring_up, check_cluster

NO_PROGRAMS = Programs("never-started", "never-started")


def settings_for(folder: Path, *overrides: str) -> Settings:
    return load(None, {}, [f"cluster.folder={folder}", "cluster.workers=2", *overrides]).settings


def test_a_second_cluster_in_the_same_folder_is_refused_with_the_owner(tmp_path: Path) -> None:
    files = Files(tmp_path, Outputs())
    with files.owned(), pytest.raises(InUse, match=f"pid {os.getpid()}"):
        bring_up(settings_for(tmp_path), Outputs(), NO_PROGRAMS)


def test_an_output_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="cannot be written"):
        bring_up(settings_for(tmp_path / "file" / "run"), Outputs(), NO_PROGRAMS)


@pytest.mark.parametrize("outputs", [Outputs(report=Path("folder")), Outputs(model=Path("folder"))])
def test_an_output_that_is_a_folder_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outputs: Outputs
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="folder: cannot be written: it is a folder"):
        bring_up(settings_for(tmp_path / "run"), outputs, NO_PROGRAMS)


@pytest.mark.parametrize(("quorum", "fits"), [("2", True), ("all", True), ("3", False)])
def test_a_quorum_above_the_number_of_workers_is_refused(tmp_path: Path, quorum: str, fits: bool) -> None:
    settings = settings_for(tmp_path, f"sync.quorum={quorum}")
    if fits:
        check_cluster(settings)
        return
    with pytest.raises(ConfigError, match=r"sync.quorum \(3\) is above cluster.workers \(2\)"):
        check_cluster(settings)


@pytest.mark.parametrize(
    ("address", "third"),
    [
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("127.0.0.1:7000", "127.0.0.1:7002"),
        ("[::1]:7000", "[::1]:7002"),
        ("nonsense", "nonsense"),
    ],
)
def test_processes_after_the_first_take_the_ports_that_follow(address: str, third: str) -> None:
    assert nth_port(address, 2) == third
