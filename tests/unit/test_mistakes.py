"""Mistakes, typed as people make them: at most three lines each, no traceback, and a code that is explained."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import pytest

from diloco_common import command as diloco
from diloco_common.command import main
from diloco_common.settings import Settings
from diloco_common.settings_loader import save
from diloco_common.wire.addresses import Endpoints, read_address, write_address
from diloco_demo import cli as worker
from diloco_deploy.cluster.roll_call import ClusterRecord
from diloco_deploy.run.folder import ClusterFolder, Outputs
from diloco_server import __main__ as server

Main = Callable[[Sequence[str]], int]
D, S, W = diloco.main, server.main, worker.main
MISTAKES: list[tuple[Main, str, int, str, str]] = [
    # program, what is typed, exit code, code, what is said
    (D, "statsu", 2, "BAD_CONFIG", "did you mean status?"),
    (D, "up --shard 3", 2, "BAD_CONFIG", "did you mean --shards?"),
    (D, "up --workers 0", 2, "BAD_CONFIG", "cluster.workers = 0 (--workers): must be a whole number from 1 to 256"),
    (D, "up --tokens many", 2, "BAD_CONFIG", "such as 2M"),
    (D, "up --config absent.toml", 2, "BAD_CONFIG", "absent.toml: no such file"),
    (D, "up --config unknown.toml", 2, "BAD_CONFIG", "there is no section [sycn]; did you mean sync?"),
    (D, "up --set sync.quorm=1", 2, "BAD_CONFIG", "did you mean sync.quorum?"),
    (D, "up --set lease.lease_s=1s", 2, "BAD_CONFIG", "at least two heartbeats"),
    (D, "up --set sync.quorum=4 --workers 2", 2, "BAD_CONFIG", "so no round could ever close"),
    (D, "up --data absent.txt", 3, "BAD_DATA", "there is no file or folder 'absent.txt'"),
    (D, "up --folder file", 2, "BAD_CONFIG", "cannot be written"),
    (D, "up --settings a.json --config b.toml", 2, "BAD_CONFIG", "leave out --config"),
    (D, "up --folder run --seed 7", 2, "BAD_CONFIG", "--fresh"),
    (D, "status --folder absent", 5, "CANNOT_CONNECT", "no cluster is running in absent"),
    (D, "status --http 127.0.0.1:1", 5, "CANNOT_CONNECT", "nobody answers at 127.0.0.1:1"),
    (D, "scale --workers 5 --folder absent", 5, "CANNOT_CONNECT", "no `diloco up` runs in absent"),
    (D, "resume absent", 3, "BAD_DATA", "begin one: diloco up --folder"),
    (D, "logs --folder absent", 3, "BAD_DATA", "there are no logs"),
    (D, "logs worker-9 --folder run", 2, "BAD_CONFIG", "did you mean worker-0?"),
    (D, "init run", 2, "BAD_CONFIG", "name another folder"),
    (D, "checkpoint absent", 3, "BAD_CHECKPOINT", "there is no folder absent"),
    (D, "restore run --shards 2 --folder new", 3, "BAD_CHECKPOINT", "holds no versions"),
    (D, "pull --shards 127.0.0.1:1 --out m --base absent", 3, "BAD_DATA", "no such folder"),
    (D, "pull --out m", 2, "BAD_CONFIG", "give --shards or --folder"),
    (D, "certs issue learner/a", 2, "BAD_CONFIG", "`diloco certs init` makes one"),
    (D, "pull --shards 127.0.0.1:1 --out m --wait 100ms", 5, "CANNOT_CONNECT", "no shard answers at 127.0.0.1:1"),
    (D, "doctor ps-0 --step-time soon", 2, "BAD_CONFIG", "such as 1s or 250ms"),
    (D, "explain NO_SUCH_CODE", 2, "BAD_CONFIG", "`diloco explain` lists all"),
    (D, "up --set security.tls=absent", 2, "BAD_CONFIG", "each process of `diloco up` needs its own"),
    (S, "--listen 0.0.0.0:0", 2, "BAD_CONFIG", "reachable from other machines"),
    (W, "--shards 127.0.0.1:1 --data absent", 3, "BAD_DATA", "absent"),
    (W, "--shards ps-0", 2, "BAD_CONFIG", "the port is missing"),
    (S, "--index 2 --count 2", 2, "BAD_CONFIG", "index 2 does not exist among 2 shards"),
    (W, "--shards 127.0.0.1:1 --set worker.learner_id=a/b", 2, "BAD_CONFIG", "worker.learner_id = a/b"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file, a few settings, and what is left of a run that made no version."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "broken.toml").write_text("[run]\nid = \n")
    (tmp_path / "unknown.toml").write_text("[sycn]\nquorum = 1\n")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "worker-0.log").write_text("training\n")
    (tmp_path / "run" / "run.toml").write_text("")
    (tmp_path / "run" / "shard-0" / "checkpoints" / "one").mkdir(parents=True)
    (tmp_path / "run" / "shard-0" / "checkpoints" / "one" / "checkpoint.json").write_text("{}")
    save(Settings(), tmp_path / "run" / "settings.json")
    return tmp_path


@pytest.mark.parametrize(
    ("program", "typed", "exit_code", "code", "says"), MISTAKES, ids=[f"{m[1]}" or "nothing" for m in MISTAKES]
)
def test_a_mistake_is_at_most_three_lines_and_has_a_code(here, capsys, program, typed, exit_code, code, says) -> None:
    assert program(typed.split()) == exit_code
    said = capsys.readouterr().err
    assert says in said
    assert said.endswith(f"[{code}]\n")
    assert 1 <= len(said.splitlines()) <= 3
    assert "Traceback" not in said


def test_a_new_folder_has_settings_that_are_taken_and_a_script_that_compiles(tmp_path, capsys) -> None:
    folder = tmp_path / "my run"
    assert diloco.main(["init", str(folder)]) == 0
    assert "diloco up --config run.toml" in capsys.readouterr().out
    assert diloco.main(["config", "show", "--config", str(folder / "run.toml"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run.id"] == {"value": "my-run", "origin": f"{folder / 'run.toml'}:5"}
    assert shown["lease.lease_s"]["origin"] == "default"
    assert shown["cluster.folder"]["origin"] == "default", "where status, logs, scale, web and resume look"
    compile((folder / "train.py").read_text(), "train.py", "exec")
    assert 'run="my-run"' in (folder / "train.py").read_text()


def test_shown_settings_are_a_file_that_gives_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--set", "run.tokens=2M", "--set", "lease.lease_s=30s", "--set", "sync.pull=bf16"]
    assert diloco.main(["config", "show", *given]) == 0
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    assert diloco.main(["config", "show", "--config", str(tmp_path / "again.toml"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [shown[name]["value"] for name in ("run.tokens", "lease.lease_s", "sync.pull")] == [
        2_000_000, 30.0, "bfloat16",
    ]  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert diloco.main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert [one.name for one in diloco.installed() if one.name not in said] == []


def test_each_command_is_said_to_be_where_it_is() -> None:
    tables = {point.dist.name: point.load() for point in metadata.entry_points(group="diloco.commands") if point.dist}
    brought = {distribution: [command.name for command in table] for distribution, table in tables.items()}
    assert brought == {distribution: list(names) for distribution, names in diloco.ELSEWHERE.items()}


def test_what_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    of_ops = [command for command in diloco.installed() if command.name in diloco.ELSEWHERE["decoupled-diloco-ops"]]
    monkeypatch.setattr(diloco, "installed", lambda: of_ops)
    assert diloco.main(["plan", "--params", "1B"]) == 2
    assert capsys.readouterr().err == (
        "diloco plan: not installed; pip install decoupled-diloco-lab (in a clone: pip install ./simulator) "
        "[BAD_CONFIG]\n"
    )

    assert diloco.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "Not installed (pip install decoupled-diloco-lab): plan, simulate, lab" in said
    assert "decoupled-diloco-ops" not in said


def test_a_distribution_that_cannot_be_imported_takes_no_other_along(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    broken = metadata.EntryPoint("broken", "no_such_module:COMMANDS", "diloco.commands")
    points = [broken, *metadata.entry_points(group="diloco.commands")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)

    assert {"status", "plan"} <= {command.name for command in diloco.installed()}
    assert "commands of no_such_module:COMMANDS cannot be imported" in capsys.readouterr().err


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
