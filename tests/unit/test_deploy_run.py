"""`diloco up`: what it refuses, its folder between two starts, ports, and what the exit or silence of a child means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco_common.errors import EXIT_REFUSED, ConfigError, InUse
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics import installed
from diloco_common.observe.metrics.worker import WorkerMetrics
from diloco_common.settings import Settings
from diloco_common.settings_loader import load, save
from diloco_common.wire.messages import Pulse
from diloco_deploy.run.folder import ClusterFolder, Outputs, anchored
from diloco_deploy.run.members import Programs
from diloco_deploy.run.supervisor import DEATHS_MAX, Action, Hanging, verdict_on_exit
from diloco_deploy.run.up import bring_up
from diloco_worker.core.connection import Caller
from diloco_worker.shell.telemetry import LearnerTelemetry


@pytest.mark.parametrize(
    ("kind", "code", "was_up", "deaths", "action", "exit_code"),
    [
        ("worker", 0, True, 1, Action.ENDED, 0),
        # A shard never ends by itself.
        ("shard", 0, True, 1, Action.AGAIN, 0),
        # What was never up and says why would say the same again.
        ("shard", 4, False, 1, Action.FAIL, 4),
        ("worker", 2, False, 1, Action.FAIL, 2),
        ("worker", -9, True, 1, Action.AGAIN, 0),
        ("worker", 1, True, DEATHS_MAX, Action.AGAIN, 0),
        ("worker", -9, True, DEATHS_MAX + 1, Action.FAIL, 1),
        ("worker", EXIT_REFUSED, True, 1, Action.LOST, EXIT_REFUSED),
        ("job", 3, False, 1, Action.FAIL, 3),
    ],
)
def test_the_exit_of_a_child_is_judged(kind, code, was_up, deaths, action, exit_code) -> None:
    verdict = verdict_on_exit(kind, code, was_up=was_up, deaths=deaths)
    assert (verdict.action, verdict.exit_code) == (action, exit_code)


@pytest.mark.parametrize(
    ("code", "out_of_memory", "said"),
    [
        (3, False, "died (exit code 3)"),
        (-9, False, "died (signal 9)"),
        (-9, True, "died (signal 9: the machine or its container ran out of memory)"),
        (1, True, "died (exit code 1)"),  # somebody else was killed meanwhile
    ],
)
def test_a_death_says_its_cause_also_lack_of_memory(code: int, out_of_memory: bool, said: str) -> None:
    """Fault 18."""
    verdict = verdict_on_exit("worker", code, was_up=True, deaths=1, out_of_memory=out_of_memory)
    assert verdict.why == said


@pytest.mark.parametrize(
    ("looks", "heard", "hung_at"),
    [
        (range(100), {}, 61),  # never heard: counted from when its ports are known
        (range(20), {7: True}, 7),  # it says so itself
        ([0, 1, 1000, 1001, 1040], {}, None),  # we were stopped ourselves, or the machine slept
        ([0, 1, 1000, *range(1001, 1100)], {}, 1060),
    ],
)
def test_a_process_hangs_by_silence_or_by_its_own_word(looks, heard, hung_at) -> None:
    hanging = Hanging()
    for now in looks:
        if now in heard:
            hanging.heard("worker-0", now, is_hung=heard[now])
        if hanging.look(["worker-0"], now):
            assert now == hung_at
            return
    assert hung_at is None


def test_a_worker_hangs_if_it_trains_and_ends_no_step() -> None:
    now = [0.0]
    telemetry = LearnerTelemetry(Caller("run", "worker-0", "process"), lambda: now[0], WorkerMetrics(), Log("worker-0"))
    now[0] = 1e6  # it waits for shards for as long as that takes
    assert telemetry.health == (True, "joining")
    telemetry.trains()
    now[0] += telemetry.hung_s - 1.0
    assert telemetry.health[0]
    now[0] += 2.0
    assert telemetry.health == (False, "no inner step has ended for 1801 s")
    status = telemetry.status(Pulse(0, 0), ())
    assert status["hung"]
    assert status["package"] == installed(), "which version a member runs is to be seen during an upgrade"
    telemetry.hung_s = 0.0
    assert telemetry.health[0]


NO_PROGRAMS = Programs("never-started", "never-started")


def settings_for(folder: Path, *overrides: str) -> Settings:
    return load(None, {}, [f"cluster.folder={folder}", "cluster.workers=2", *overrides]).settings


def test_a_second_cluster_in_the_same_folder_is_refused_with_the_owner(tmp_path: Path) -> None:
    files = ClusterFolder(tmp_path, Outputs())
    with files.owned(), pytest.raises(InUse, match=f"pid {os.getpid()}"):
        bring_up(settings_for(tmp_path), Outputs(), NO_PROGRAMS)


@pytest.fixture
def files(tmp_path: Path) -> ClusterFolder:
    """A folder in which a run of two shards and a worker was begun."""
    files = ClusterFolder(tmp_path, Outputs())
    with files.owned():
        assert files.prepare(settings_for(tmp_path), fresh=False) is False
    save(settings_for(tmp_path), files.settings)
    for folder in (files.shard_folder(0), files.shard_folder(1), files.worker_folder(0)):
        folder.mkdir()
    (files.shard_folder(0) / "fragment-0000-version-000000000003.safetensors").touch()
    (files.worker_folder(0) / "checkpoint.safetensors").touch()
    (tmp_path / "shard-notes").mkdir()
    return files


def folders(files: ClusterFolder) -> list[str]:
    return sorted(path.name for path in files.folder.iterdir() if path.is_dir() and path.name not in ("run", "logs"))


@pytest.mark.parametrize("change", ["run.tokens=7", "cluster.workers=9"])
def test_the_same_command_goes_on_with_the_run_and_may_change_how_it_is_run(files: ClusterFolder, change: str) -> None:
    """reliability.md 6."""
    assert files.prepare(settings_for(files.folder, change), fresh=False) is True
    assert folders(files) == ["shard-0", "shard-1", "shard-notes", "worker-0"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("run.seed=5", "run.seed: 0 <-> 5"),
        ("model.width=48", "model.width: 96 <-> 48"),
        ("cluster.shards=3", "cluster.shards: 2 <-> 3"),
        ("train.average_momentum=true", "train.average_momentum: False <-> True"),
    ],
)
def test_another_run_in_the_same_folder_is_refused_with_the_differences(
    files: ClusterFolder, change: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        files.prepare(settings_for(files.folder, change), fresh=False)
    assert "--fresh" in str(refused.value)
    assert folders(files) == ["shard-0", "shard-1", "shard-notes", "worker-0"]


def test_a_fresh_run_deletes_the_old_one_and_nothing_else(files: ClusterFolder) -> None:
    assert files.prepare(settings_for(files.folder, "run.seed=5"), fresh=True) is False
    assert folders(files) == ["shard-notes"]


def test_what_a_link_leads_to_is_not_deleted(files, tmp_path) -> None:
    elsewhere = tmp_path / "elsewhere"
    files.shard_folder(0).rename(elsewhere)
    files.shard_folder(0).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is a link"):
        files.prepare(settings_for(files.folder, "run.seed=5"), fresh=True)
    assert [*elsewhere.iterdir()]


def test_checkpoints_of_workers_go_where_no_shard_kept_a_version(files: ClusterFolder) -> None:
    for path in files.shard_folder(0).iterdir():
        path.unlink()
    assert files.prepare(settings_for(files.folder), fresh=False) is False
    assert folders(files) == ["shard-notes"]


def test_checkpoints_that_are_all_that_is_left_are_not_deleted_by_accident(files: ClusterFolder) -> None:
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


def test_a_data_folder_other_than_that_of_the_run_is_refused_and_nothing_is_deleted(files, tmp_path) -> None:
    other = ClusterFolder(files.folder, Outputs(), tmp_path / "disk")
    with pytest.raises(ConfigError, match=r"shard.data_dir: None <-> "):
        other.prepare(settings_for(files.folder, f"shard.data_dir={tmp_path / 'disk'}"), fresh=False)
    assert folders(files) == ["shard-0", "shard-1", "shard-notes", "worker-0"]


def test_settings_mean_the_same_to_a_command_that_is_typed_elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = anchored(settings_for(Path("run"), "shard.data_dir=disk", "data.source=text"))
    assert (settings.cluster.folder, settings.shard.data_dir) == (tmp_path / "run", tmp_path / "disk")
    assert settings.data.source == str(tmp_path / "text")
    assert anchored(settings_for(Path("run"))).data.source == "stdlib"
