"""`diloco up` with stand-ins for its children (tests/contract/fakes): what it starts, keeps alive, ends and says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from diloco_common.command import main
from diloco_common.errors import EXIT_REFUSED
from diloco_common.settings import Settings
from diloco_common.settings_loader import load, load_saved
from diloco_common.wire.addresses import read_address
from diloco_deploy.cluster.roll_call import read_record
from diloco_deploy.run.folder import Outputs
from diloco_deploy.run.members import Programs
from diloco_deploy.run.supervisor import DEATHS_MAX, ChildSpec, Supervisor
from diloco_deploy.run.up import bring_up
from waiting import until

FAKES = Path(__file__).parent / "fakes"
PROGRAMS = Programs("fake_server", "fake_worker")

COMMAND = """
import sys
from pathlib import Path
import diloco_deploy.run.supervisor
import diloco_deploy.run.up
from diloco_common.command import run_command
from diloco_common.settings_loader import load
from diloco_deploy.run.folder import Outputs
from diloco_deploy.run.members import Programs
from diloco_deploy.run.up import bring_up
diloco_deploy.run.up.END_S = float(sys.argv[1])
diloco_deploy.run.supervisor.LONG_S = float(sys.argv[2])
settings = load(None, {}, sys.argv[3:]).settings
programs = Programs("fake_server", "fake_worker")
sys.exit(run_command(lambda: bring_up(settings, Outputs(), programs), name="diloco"))
"""


@pytest.fixture(autouse=True)
def fakes_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), *filter(None, sys.path)]))


def settings_for(folder: Path, *overrides: str) -> Settings:
    cluster = [f"cluster.folder={folder}", "cluster.shards=2", "cluster.workers=2"]
    return load(None, {}, [*cluster, *overrides]).settings


class Command:
    def __init__(
        self, folder: Path, worker: str, *overrides: str, drain_s: float = 20.0, silent_s: float = 60.0
    ) -> None:
        """`worker`: what stand-ins for workers do."""
        self.folder = folder
        cluster = [f"cluster.folder={folder}", "cluster.shards=2", "cluster.workers=2"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(drain_s), str(silent_s), *cluster, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "FAKE_WORKER": worker},
        )

    def trains(self) -> Command:
        self.children()
        until(lambda: (found := read_record(self.folder)) and found.members["worker-1"].process == "up", "the record")
        return self

    def children(self) -> list[psutil.Process]:
        """Shards and workers, once all of them are up."""
        files = [self.folder / "run" / f"{name}-{i}.json" for name in ("shard", "worker") for i in range(2)]
        until(lambda: all(file.exists() for file in files), "what the processes write")
        return [psutil.Process(json.loads(file.read_text())["pid"]) for file in files]

    def end(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=200)
        return self.process.returncode, said


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(worker: str, *overrides: str, **limits: float) -> Command:
        started.append(Command(tmp_path / "run", worker, *overrides, **limits))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def gone(children: list[psutil.Process]) -> bool:
    return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


@pytest.fixture
def new_processes() -> Callable[[], list[psutil.Process]]:
    """What was started since: other tests may have servers that make processes for them."""
    before = psutil.Process().children(recursive=True)
    return lambda: [child for child in psutil.Process().children(recursive=True) if child not in before]


def test_a_run_ends_with_a_report_a_model_and_no_process(tmp_path, capsys, new_processes) -> None:
    outputs = Outputs(report=tmp_path / "out" / "report.json", model=tmp_path / "out" / "model.safetensors")
    assert bring_up(settings_for(tmp_path / "run", "run.seed=5"), outputs, PROGRAMS) == 0

    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["eval_loss_first"] == 5.5
    assert report["eval_loss_final"] == 2.25
    assert report["tokens"] == 1200, "the last words of the workers count, not what was polled before"
    assert report["versions"] == {"0": 3, "1": 4}
    assert (report["rounds"], report["late"], report["seed"]) == (7, 2, 5)
    assert report["tokens_per_s"] == {"worker-0": 50.0, "worker-1": 50.0, "all": 100.0}
    assert report["settings"]["cluster"]["shards"] == 2
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"model"
    said = capsys.readouterr().out
    assert "5.500 -> 2.250 nats per byte" in said
    assert "first loss 2.500" in said
    assert new_processes() == []


def test_a_worker_that_hangs_is_killed_and_started_again(command: Callable[..., Command]) -> None:
    up = command("waits", silent_s=1.0).trains()
    found = read_address(up.folder / "run" / "worker-0.json")
    assert found is not None
    os.kill(found.pid, signal.SIGSTOP)

    def is_another() -> bool:
        again = read_address(up.folder / "run" / "worker-0.json")
        return again is not None and again.pid != found.pid

    until(is_another, "another process of worker-0")
    up.process.send_signal(signal.SIGINT)
    _, said = up.end()
    assert "worker-0 hangs, and is killed: it has not answered for" in said
    assert "worker-1 hangs" not in said


def test_the_last_lost_worker_ends_the_cluster(tmp_path, capsys, monkeypatch, new_processes) -> None:
    monkeypatch.setenv("FAKE_WORKER", "lost")
    assert bring_up(settings_for(tmp_path), Outputs(), PROGRAMS) == EXIT_REFUSED
    assert "was refused (exit code" in capsys.readouterr().out
    assert new_processes() == []


def test_a_child_that_cannot_start_ends_everything_with_its_exit_code_and_last_words(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    new_processes: Callable[[], list[psutil.Process]],
) -> None:
    monkeypatch.setenv("FAKE_WORKER", "fails")
    assert bring_up(settings_for(tmp_path), Outputs(), PROGRAMS) == 2
    assert "no GPU here [BAD_CONFIG]" in capsys.readouterr().err
    assert new_processes() == []


def test_a_second_ctrl_c_kills_who_does_not_listen(command: Callable[..., Command]) -> None:
    up = command("deaf")
    children = up.children()
    up.process.send_signal(signal.SIGINT)
    assert up.process.stdout is not None
    until(lambda: "interrupt again to kill them" in up.process.stdout.readline(), "the word that it ends")
    up.process.send_signal(signal.SIGINT)
    code, said = up.end()
    assert code == 130
    assert "worker-0 did not end by itself and was killed" in said
    assert gone(children)


def test_children_end_when_the_command_is_killed(command: Callable[..., Command]) -> None:
    up = command("waits")
    children = up.children()
    up.process.kill()
    until(lambda: gone(children), "its children to end", 30.0)


def test_workers_come_and_go_while_it_runs_and_who_was_told_to_leave_is_no_end(command, capsys) -> None:
    up = command("waits")
    up.trains()
    third = up.folder / "run" / "worker-2.json"

    assert main(["scale", "--workers", "3", "--folder", str(up.folder)]) == 0
    until(third.exists, "the third worker")
    assert main(["scale", "--workers", "1", "--folder", str(up.folder)]) == 0

    def members() -> set[str]:
        found = read_record(up.folder)
        return set(found.members) if found is not None else set()

    until(lambda: members() == {"shard-0", "shard-1", "worker-0"}, "the end of the others")
    assert up.process.poll() is None, "training goes on"
    assert load_saved(up.folder / "settings.json").settings.cluster.workers == 1
    assert "2 -> 3 workers (1 start)" in capsys.readouterr().out


def test_a_killed_worker_is_started_again_and_the_record_says_how_often(command: Callable[..., Command]) -> None:
    up = command("waits")
    children = up.children()
    up.trains()
    children[3].kill()

    def again() -> bool:
        found = read_record(up.folder)
        return found is not None and found.members["worker-1"].restarts == 1

    until(again, "the next start", 30.0)
    known = read_record(up.folder)
    assert known is not None
    assert known.members["worker-1"].why == "died (signal 9)"
    assert (known.shards, known.workers) == (2, 2)
    up.process.send_signal(signal.SIGINT)
    _, said = up.end()
    assert "worker-1 died (signal 9)" in said
    assert "worker-1 started again" in said


def test_a_death_that_was_asked_for_is_no_exit_and_lasts_as_long_as_asked(tmp_path: Path) -> None:
    waits = ChildSpec("ann", "worker", "http.server", lambda: ["--bind=127.0.0.1", "0"], tmp_path / "log")
    with Supervisor() as supervisor:
        supervisor.start(waits)
        for _ in range(DEATHS_MAX + 1):
            supervisor.kill_for("ann", 100.0)
            now = time.monotonic()
            assert supervisor.pid("ann") is None
            assert supervisor.look(now) == []
            assert supervisor.start_due(now + 99) == []
            assert supervisor.start_due(now + 101) == ["ann"]
            assert supervisor.pid("ann") is not None


def test_a_killed_shard_comes_back_on_the_same_ports(command: Callable[..., Command]) -> None:
    up = command("waits")
    children = up.children()
    file = up.folder / "run" / "shard-1.json"
    before = json.loads(file.read_text())
    children[1].kill()

    def again() -> Any:
        try:
            found = json.loads(file.read_text())
        except FileNotFoundError:  # until the next process is up
            return None
        return found if found["pid"] != before["pid"] else None

    after = until(again, "the next start", 30.0)
    assert (after["grpc"], after["http"]) == (before["grpc"], before["http"])
