"""Our scripts on a real Slurm: three nodes, two shards, two workers. Run by `make e2e-slurm`.

The tests are chapters of one run, in this order. The last one judges what all its processes wrote.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import SHARDS, TINY, WORKERS, Watched, as_environment
from slurm_cluster import Slurm

from diloco_simulator.verify.histories import Line, read_histories, read_history
from diloco_simulator.verify.judge import violations
from pages import blocks

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@dataclass
class Run(Watched):
    slurm: Slurm
    folder: Path
    shards: str = ""
    workers: str = ""

    def id_of(self, name: str) -> str:
        kind, _, index = name.partition("-")
        return f"{self.shards if kind == 'shard' else self.workers}_{index}"

    def job(self, name: str) -> dict[str, str]:
        return self.slurm.show(self.id_of(name))

    def restarts(self, name: str) -> int:
        return int(self.job(name)["Restarts"])

    def seconds_of(self, name: str) -> int:
        hours, minutes, seconds = map(int, self.job(name)["RunTime"].split(":"))
        return 3600 * hours + 60 * minutes + seconds

    def hurry(self) -> None:
        """What an operator does who does not want to wait until jobs that were queued again may begin."""
        for name in (*SHARDS, *WORKERS):
            if self.job(name)["JobState"] != "PENDING":
                continue
            with suppress(subprocess.CalledProcessError):  # it has just begun
                self.slurm.control("update", f"JobId={self.id_of(name)}", "StartTime=now")

    def log(self, name: str) -> str:
        return (self.folder / f"diloco-{name}.log").read_text()

    def lines(self, name: str, *what: str) -> list[Line]:
        path = self.folder / "history" / f"{name}.jsonl"
        return [line for line in (read_history(path) if path.exists() else []) if line["what"] in what]

    def since_birth(self, name: str, what: str) -> list[Line]:
        """Of its present life."""
        lines = self.lines(name, "born", what)
        last = max((i for i, line in enumerate(lines) if line["what"] == "born"), default=0)
        return lines[last + 1 :]

    def said(self) -> str:
        logs = (f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))
        return "\n".join([*logs, self.slurm.logs()])


def page(folder: Path) -> Iterator[list[str]]:
    """The lines of docs/operations.md, for this folder, two workers, and nodes without GPUs."""
    for line in blocks(ROOT / "docs/operations.md")["slurm"].splitlines():
        command, *options, script = shlex.split(line.replace("/shared/my-run", str(folder)).replace("=0-7", "=0-1"))
        assert command == "sbatch"
        yield [*options, *(["--gpus=0"] if "workers" in script else []), str(ROOT / script)]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as made:  # munged does not work below pytest's own, which are root's alone
        folder = Path(made)
        folder.chmod(0o755)
        with Slurm(("n1", "n2", "n3"), folder) as slurm:
            run = Run(slurm, folder / "run")
            run.folder.mkdir()
            settings = {**TINY, "run.history": run.folder / "history"}
            env = {
                **as_environment(settings), "OMP_NUM_THREADS": "1",
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            }  # fmt: skip
            run.shards, run.workers = (
                slurm.sbatch(f"--output={run.folder}/%x-%a.log", *options, env=env) for options in page(run.folder)
            )
            yield run


def test_shards_and_workers_find_each_other(run: Run) -> None:
    run.wait_for_merges_of_all()


def test_a_node_that_dies_takes_no_other_shard_with_it(run: Run) -> None:
    node = run.job("shard-0")["NodeList"]
    assert run.job("shard-1")["NodeList"] != node
    other = len(run.lines("shard-1", "announced"))

    run.slurm.kill(node)
    run.until(lambda: run.restarts("shard-0") == 1, "Slurm to queue shard 0 again")
    run.until(lambda: len(run.lines("shard-1", "announced")) > other + 4, "versions of shard 1 meanwhile")
    assert run.born("shard-0") == 1, "Slurm lets what it queues again begin after two minutes"

    run.hurry()
    run.until(lambda: run.born("shard-0") == 2, "shard 0 on another node")
    assert run.job("shard-0")["NodeList"] != node
    run.wait_for_merges_of_all()
    assert run.born("shard-1") == 1


def test_preempted_and_before_the_time_limit_they_end_in_order_and_are_queued_again(run: Run) -> None:
    minutes = 2 + run.seconds_of("shard-0") // 60  # one to two minutes are left: less than --signal asks for
    run.slurm.control("update", f"JobId={run.id_of('shard-0')}", f"TimeLimit={minutes}")
    lives = {name: run.born(name) for name in (*SHARDS, *WORKERS)}
    restarts = {name: run.restarts(name) for name in lives}

    node = run.job("worker-0")["NodeList"]
    run.slurm.sbatch(
        "--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=true", env={}
    )
    for name in ("worker-0", "shard-0"):
        run.until(lambda name=name: run.restarts(name) > restarts[name], f"{name} to be queued again")
    # It would get the same short limit again, and so be told to end while it starts.
    run.slurm.control("update", f"JobId={run.id_of('shard-0')}", "TimeLimit=UNLIMITED")
    assert run.since_birth("worker-0", "ended"), "it said goodbye"
    assert "shard-0 ended tokens_merged=" in run.log("shard-0")

    def are_back() -> bool:
        run.hurry()
        return all(run.born(name) > lives[name] for name in ("worker-0", "shard-0"))

    run.until(are_back, "both to go on", every_s=2.0)
    run.wait_for_merges_of_all()


def test_all_histories_keep_the_promises(run: Run) -> None:
    for job in (run.workers, run.shards):
        run.slurm.cancel(job)
        run.until(lambda job=job: not run.slurm.is_active(job), "everything to end")
    assert violations(read_histories(run.folder / "history")) == []
    for name in (*SHARDS, *WORKERS):
        assert "Traceback" not in run.log(name)
