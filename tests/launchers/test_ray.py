"""`diloco up --on ray` on a real Ray cluster: three nodes, two shards, two workers. Run by `make e2e-ray`.

The tests are chapters of one run, in this order. The last one judges what all its processes wrote.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from runs import SHARDS, TINY, WORKERS, Watched, as_environment

from diloco_common.wire.addresses import read_address
from diloco_simulator.verify.histories import Histories, Line, gather, read_history
from diloco_simulator.verify.judge import violations
from pages import blocks

if TYPE_CHECKING:
    from ray_cluster import RayCluster

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


@dataclass
class Run(Watched):
    ray: RayCluster
    folder: Path
    driver: subprocess.Popen[bytes]

    def histories(self, name: str) -> list[list[Line]]:
        """What a member wrote in each of its lives, by the time of their beginning."""
        found = [read_history(path) for path in (self.folder / "history").glob(f"*/{name}.jsonl")]
        return sorted((lines for lines in found if lines), key=lambda lines: lines[0]["t"])

    def judged(self) -> Histories:
        return gather((name, lines) for name in (*SHARDS, *WORKERS) for lines in self.histories(name))

    def lives(self, name: str) -> int:
        return len(list((self.folder / "run/lives").glob(f"{name}.*")))

    def lines(self, name: str, *what: str) -> list[Line]:
        return [line for lines in self.histories(name) for line in lines if line["what"] in what]

    def pid(self, name: str) -> int:
        found = read_address(self.folder / "run" / f"{name}.json")
        assert found is not None
        return found.pid

    def said(self) -> str:
        return (self.folder.parent / "driver.log").read_text()

    def members_below(self, raylet: psutil.Process) -> list[str]:
        return [name for name in (*SHARDS, *WORKERS) if self.ray.raylet_of(self.pid(name)) == raylet]


def is_alive(process: psutil.Process) -> bool:
    """A dead one whose parent never asked after it still has a name: nobody looks after what a dead raylet left."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    from ray_cluster import RayCluster

    where = tmp_path_factory.mktemp("ray")
    folder = where / "run"
    with RayCluster(nodes=3) as ray:
        settings = {**TINY, "run.history": folder / "history"}
        (line,) = blocks(ROOT / "docs/launchers.md")["ray"].splitlines()  # as a person would type it
        program, *options = shlex.split(
            line.replace("/shared/my-run", str(folder)).replace("--workers 8", "--workers 2")
        )
        assert program == "diloco"
        env = {**os.environ, **as_environment(settings), "RAY_ADDRESS": ray.address}
        command = [sys.executable, "-m", "diloco_deploy", *options]
        driver = subprocess.Popen(command, env=env, stdout=(where / "driver.log").open("wb"), stderr=subprocess.STDOUT)
        try:
            yield Run(ray, folder, driver)
        finally:
            driver.kill()
            driver.wait()


def test_shards_and_workers_find_each_other_on_ray(run: Run) -> None:
    run.wait_for_merges_of_all()


def test_a_worker_that_dies_is_started_again_on_its_node(run: Run) -> None:
    psutil.Process(run.pid("worker-0")).kill()
    run.until(lambda: run.born("worker-0") == 2, "worker-0 to be back")
    run.until(lambda: psutil.pid_exists(run.pid("worker-0")), "its address")  # is written once it is up
    run.wait_for_merges_of_all()
    assert run.lives("worker-0") == 1


def test_a_node_that_dies_takes_no_other_shard_with_it_on_ray(run: Run) -> None:
    raylet = run.ray.raylet_of(run.pid("shard-0"))
    lost = run.members_below(raylet)
    kept = [name for name in (*SHARDS, *WORKERS) if name not in lost]
    assert "shard-1" in kept
    versions = len(run.lines("shard-1", "merging"))

    run.ray.kill(raylet, with_processes=True)
    run.until(lambda: len(run.lines("shard-1", "merging")) > versions + 4, "versions of shard 1 meanwhile")
    for name in lost:
        run.until(lambda name=name: run.lives(name) == 2, f"{name} on another node")
    run.wait_for_merges_of_all()
    assert [run.lives(name) for name in kept] == [1] * len(kept)


def test_a_raylet_that_dies_alone_leaves_old_and_new_side_by_side(run: Run) -> None:
    run.ray.add_node()  # one has died, and another one is about to
    raylet = run.ray.raylet_of(run.pid("shard-1"))
    members = run.members_below(raylet)
    old = {name: psutil.Process(run.pid(name)) for name in members}
    lives = {name: run.lives(name) for name in members}

    run.ray.kill(raylet, with_processes=False)
    for name in members:
        run.until(lambda name=name: run.lives(name) == lives[name] + 1, f"the next life of {name}")
    assert [name for name, process in old.items() if is_alive(process)] == members, "side by side"
    # A worker's new process fences the old one off. A shard's waits: the old one serves, and has the folder.
    for name in {*members} & {*WORKERS}:
        run.until(lambda name=name: not is_alive(old[name]), f"the old {name} to stop")
    run.until(lambda: "shard-1 on" in run.said() and "waits for its former process" in run.said(), "the new shard 1")
    run.wait_for_merges_of_all()
    assert is_alive(old["shard-1"])

    for process in (old["shard-1"].parent(), old["shard-1"]):
        assert process is not None
        process.kill()
    run.until(lambda: run.pid("shard-1") != old["shard-1"].pid, "the new shard 1 to take over")
    run.wait_for_merges_of_all()


def test_all_histories_keep_the_promises_on_ray(run: Run) -> None:
    run.driver.send_signal(signal.SIGINT)
    assert run.driver.wait(run.deadline_s) == 130
    assert "every announced version is on disk" in run.said()
    assert violations(run.judged()) == []
    for log in (run.folder / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log.name
