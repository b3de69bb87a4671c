"""One run of versus.py: one system, one link, one case, on machines of its own. Gives its figures."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import versus_figures
from versus_machines import LINKS, Machines
from versus_task import Task

HERE = Path(__file__).resolve().parent
WORKERS = 4
VICTIM = 3
"""The worker that is slow, or is killed. No service runs beside it."""
START_S = 300.0
LOOK_S = 0.05
TRIES = 8
"""A worker that ends by itself is started again this often, as any cluster manager would."""
SYSTEMS = {"ours": (0, 1), "ddp": (), "torchft": (0,), "hivemind": (0,), "alone": (), "mean": (0, 1)}
"""Name -> workers beside whose machine a service of the system runs (shards, lighthouse, first DHT node)."""
CASES = ("plain", "slow", "killed")
TORCHRUN = [
    "--nnodes=3:4", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-backend=c10d", "--rdzv-id=versus",
    "--monitor-interval=0.2",
    "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120,is_host={is_host}",
]  # fmt: skip
"""Quicker than the defaults (30 s of last call, 15 s until a dead agent is forgotten), so that DDP is back sooner."""


@dataclass(frozen=True)
class Cell:
    system: str
    link: str
    case: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.system}/{self.link}/{self.case}" + (f"/seed {self.seed}" if self.seed else "")


@dataclass(frozen=True)
class Times:
    """In seconds, of one run."""

    warm: float = 8.0
    """From the first step; not measured."""
    measured: float = 32.0
    kill_after: float = 10.0
    """From the beginning of what is measured."""
    away: float = 30.0
    """Until the killed worker is started again. Such a run is measured for so much longer."""


class Cluster:
    """The processes of one run, each on its machine."""

    def __init__(self, cell: Cell, task: Task, python: str, machines: Machines) -> None:
        self._cell, self._task, self._python, self._machines = cell, task, python, machines
        self._path = task.save()
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._services: list[subprocess.Popen[bytes]] = []
        self.ended_by_themselves: list[str] = []

    def start(self) -> None:
        self._services = [self._start("service", i) for i in SYSTEMS[self._cell.system]]
        for rank in range(WORKERS):
            self.start_worker(rank)

    def start_worker(self, rank: int) -> None:
        self._workers[rank] = self._start("worker", rank)

    def kill(self, rank: int) -> None:
        """The worker and all that belongs to it."""
        _end(self._workers.pop(rank))

    def tend(self) -> None:
        """Start again what has ended by itself."""
        for rank, process in list(self._workers.items()):
            if process.poll() is not None:
                why = f"worker {rank} ended with {process.returncode}: {self.last_words(f'worker-{rank}')}"
                if len(self.ended_by_themselves) >= TRIES:
                    raise RuntimeError(f"too many deaths; the last: {why}")
                self.ended_by_themselves.append(why)
                self.start_worker(rank)
        for process in self._services:
            if process.poll() is not None:
                raise RuntimeError(f"a service ended with {process.returncode}: {self.last_words('service')}")

    def last_words(self, prefix: str) -> str:
        """The last line of a log that looks like an error."""
        lines = [
            line.strip()
            for path in sorted(Path(self._task.folder).glob(f"{prefix}*.log"))
            for line in path.read_text(errors="replace").splitlines()
        ]
        errors = [line for line in lines if "Error" in line or "error" in line]
        return (errors or lines or ["it said nothing"])[-1][:300]

    def end(self) -> None:
        for process in (*self._workers.values(), *self._services):
            _end(process)

    def _start(self, role: str, number: int) -> subprocess.Popen[bytes]:
        script = [str(HERE / f"versus_{self._cell.system}.py"), role, str(number), str(self._path)]
        host = self._task.hosts[number]
        command = [self._python, *script]
        if self._cell.system == "ddp":
            options = [option.format(is_host=int(number == 0)) for option in TORCHRUN]
            options += [f"--rdzv-endpoint={self._task.hosts[0]}:29400", f"--local-addr={host}"]
            command = [self._python, "-m", "torch.distributed.run", *options, *script]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": self._task.folder,
            "PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", ""))), "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        with Path(self._task.folder, f"{role}-{number}.log").open("ab") as log:
            return subprocess.Popen(
                self._machines.command(number, command), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, cwd=self._task.folder,
            )  # fmt: skip


def run_cell(
    cell: Cell, python: str, times: Times, text: tuple[bytes, bytes], keep: Path | None = None
) -> dict[str, Any]:
    """The figures of one run; if it fails, what happened. `text`: to train on, and held out."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="versus-", dir=base)))
        machines = stack.enter_context(Machines(WORKERS, LINKS[cell.link]))
        for name, content in zip(("train.bin", "held.bin"), text, strict=True):
            Path(folder, name).write_bytes(content)
        task = Task(
            str(folder), machines.hosts, cell.link, step_s=0.25, slow_rank=VICTIM if cell.case == "slow" else -1,
            seed=cell.seed,
        )  # fmt: skip
        cluster = Cluster(cell, task, python, machines)
        stack.callback(cluster.end)
        if keep is not None:
            stack.callback(_copy, folder, keep)
        found: dict[str, Any] = {"system": cell.system, "link": cell.link, "case": cell.case, "seed": cell.seed}
        try:
            window = _run(cell, cluster, task, machines, times)
        except RuntimeError as error:
            return found | {"failed": str(error)}
        cluster.end()
        return (
            found
            | versus_figures.of_run(task, cell.case, window, cell.system)
            | {"deaths": cluster.ended_by_themselves}
        )


def _run(cell: Cell, cluster: Cluster, task: Task, machines: Machines, times: Times) -> versus_figures.Window:
    cluster.start()
    folder, deadline = Path(task.folder), time.monotonic() + START_S
    while len(list(folder.glob("ready-*"))) < WORKERS:
        cluster.tend()
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all workers are ready after {START_S:g} s: {cluster.last_words('worker')}")
        time.sleep(0.1)
    go = time.monotonic() + 0.5
    Path(folder, "go.tmp").write_text(str(go))
    Path(folder, "go.tmp").rename(folder / "go")
    began = go + times.warm
    ended = began + times.measured + (times.away if cell.case == "killed" else 0.0)
    due: list[tuple[float, Callable[[], None]]] = []
    if cell.case == "killed":
        killed = began + times.kill_after
        due = [(killed, lambda: cluster.kill(VICTIM)), (killed + times.away, lambda: cluster.start_worker(VICTIM))]
    _tend_until(began, cluster, [])
    sent = machines.sent_bytes()
    stood_still = _tend_until(ended, cluster, due)
    return versus_figures.Window(go, began, ended, machines.sent_bytes() - sent, os.getloadavg()[0], stood_still)


def _tend_until(ended: float, cluster: Cluster, due: list[tuple[float, Callable[[], None]]]) -> float:
    """Do what is due when it is due. Returns the longest time, in seconds, by which a short sleep was too long."""
    stood_still = 0.0
    while (now := time.monotonic()) < ended:
        while due and now >= due[0][0]:
            due.pop(0)[1]()
        cluster.tend()
        asleep = time.monotonic()
        time.sleep(LOOK_S)
        stood_still = max(stood_still, time.monotonic() - asleep - LOOK_S)
    return stood_still


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _copy(folder: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("*.log"), *folder.glob("steps-*.txt")):
        shutil.copy(path, to)
