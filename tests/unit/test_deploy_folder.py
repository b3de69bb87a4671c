"""A cluster's folder between two starts of `diloco up`: what is gone on with, what is refused, what is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_common.errors import ConfigError
from diloco_common.settings import Settings
from diloco_common.settings_loader import load, save
from diloco_deploy.run.folder import Files, Outputs, anchored


def settings_for(folder: Path, *overrides: str) -> Settings:
    return load(None, {}, [f"cluster.folder={folder}", *overrides]).settings


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A folder in which a run of two shards and a worker was begun."""
    files = Files(tmp_path, Outputs())
    with files.owned():
        assert files.prepare(settings_for(tmp_path), fresh=False) is False
    save(settings_for(tmp_path), files.settings)
    for folder in (files.shard_folder(0), files.shard_folder(1), files.worker_folder(0)):
        folder.mkdir()
    (files.shard_folder(0) / "fragment-0000-version-000000000003.safetensors").touch()
    (files.worker_folder(0) / "checkpoint.safetensors").touch()
    (tmp_path / "shard-notes").mkdir()
    return files


def folders(files: Files) -> list[str]:
    return sorted(path.name for path in files.folder.iterdir() if path.is_dir() and path.name not in ("run", "logs"))


@pytest.mark.parametrize("change", ["run.tokens=7", "cluster.workers=9", "outer.lr=0.1", "lease.lease_s=9"])
def test_the_same_command_goes_on_with_the_run_and_may_change_how_it_is_run(files: Files, change: str) -> None:
    """faults.md 6."""
    assert files.prepare(settings_for(files.folder, change), fresh=False) is True
    assert folders(files) == ["shard-0", "shard-1", "shard-notes", "worker-0"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("run.seed=5", "run.seed: 0 <-> 5"),
        ("model.width=48", "model.width: 96 <-> 48"),
        ("sync.fragments=5", "sync.fragments: 24 <-> 5"),
        ("cluster.shards=3", "cluster.shards: 2 <-> 3"),
        ("data.held_out=0.2", "data.held_out: 0.05 <-> 0.2"),
        ("train.average_momentum=true", "train.average_momentum: False <-> True"),
    ],
)
def test_another_run_in_the_same_folder_is_refused_with_the_differences(files: Files, change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        files.prepare(settings_for(files.folder, change), fresh=False)
    assert "--fresh" in str(refused.value)
    assert folders(files) == ["shard-0", "shard-1", "shard-notes", "worker-0"]


def test_a_fresh_run_deletes_the_old_one_and_nothing_else(files: Files) -> None:
    assert files.prepare(settings_for(files.folder, "run.seed=5"), fresh=True) is False
    assert folders(files) == ["shard-notes"]


def test_checkpoints_of_workers_go_where_no_shard_kept_a_version(files: Files) -> None:
    for path in files.shard_folder(0).iterdir():
        path.unlink()
    assert files.prepare(settings_for(files.folder), fresh=False) is False
    assert folders(files) == ["shard-notes"]


def test_checkpoints_that_are_all_that_is_left_are_not_deleted_by_accident(files: Files) -> None:
    checkpoint = files.shard_folder(0) / "checkpoints" / "version-000000000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").touch()
    for path in files.shard_folder(0).glob("fragment-*"):
        path.unlink()
    with pytest.raises(ConfigError, match="diloco restore"):
        files.prepare(settings_for(files.folder), fresh=False)
    assert checkpoint.exists()
    assert files.prepare(settings_for(files.folder), fresh=True) is False
    assert not checkpoint.exists()


def test_shards_may_keep_their_versions_elsewhere(files: Files, tmp_path: Path) -> None:
    other = Files(files.folder, Outputs(), tmp_path / "disk")
    assert other.shard_folder(1) == tmp_path / "disk" / "shard-1"


def test_a_data_folder_other_than_that_of_the_run_is_refused_and_nothing_is_deleted(
    files: Files, tmp_path: Path
) -> None:
    other = Files(files.folder, Outputs(), tmp_path / "disk")
    with pytest.raises(ConfigError, match=r"shard.data_dir: None <-> "):
        other.prepare(settings_for(files.folder, f"shard.data_dir={tmp_path / 'disk'}"), fresh=False)
    assert folders(files) == ["shard-0", "shard-1", "shard-notes", "worker-0"]


def test_settings_mean_the_same_to_a_command_that_is_typed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = anchored(settings_for(Path("run"), "shard.data_dir=disk", "data.source=text"))
    assert (settings.cluster.folder, settings.shard.data_dir) == (tmp_path / "run", tmp_path / "disk")
    assert settings.data.source == str(tmp_path / "text")
    assert anchored(settings_for(Path("run"))).data.source == "stdlib"
