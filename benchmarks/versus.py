"""The comparison that users make: the same training with ours and with its peers, over real, thin links.

    sudo .venv/bin/python benchmarks/versus.py                                     # what is missing, then the page
    sudo .venv/bin/python benchmarks/versus.py --only ours,ddp --links 100mbit --cases plain --again
    sudo .venv/bin/python benchmarks/versus.py --links 100mbit --seed 1                            # another seed
    .venv/bin/python benchmarks/versus.py --page                                   # only the page and the picture

4 or 16 workers train a small GPT on real text, each on a machine of its own (a network namespace behind its link).
Needs root, iproute2, nsenter and unshare, and the peers, each in an environment of its own:

    for p in torchft hivemind flwr; do python -m venv VENVS/$p && VENVS/$p/bin/pip install torch==2.13.0 $p; done
    ... versus.py --venvs VENVS

DDP and ours run under the Python of this script. A run takes about a minute; a peer that is not installed is skipped.
Let nothing else run on the machine. Each run adds a line to benchmarks/results/versus.jsonl. The newest line counts for
each system, link, case and seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import versus_page
from diloco_deploy.trust.tending import OwnCertificates
from versus_systems import CERTS, SHARDS
from versus_task import Task

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))
from networks import LongLink, NotPossible, run

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "versus.jsonl"
COMMIT = subprocess.run(
    ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True, check=False
).stdout.strip()
PEERS = {"torchft": "torchft", "hivemind": "hivemind", "flower": "flwr"}
"""System -> its package, which is also the name of its environment."""
CORES = 2
"""All processes of a run share this many cores."""
START_S = 300.0
WORKERS = {"plain": 4, "slow": 4, "killed": 4, "many": 16}
"""Case -> number of workers. The last worker is slow, or is killed; no service runs beside it."""
STEP_S = 0.1
"""Seconds of an inner step per worker: with 4 workers, a step takes 0.4 s. Each computes for about 0.1 s of it. So half
of the two cores stays free, and systems differ by what they do with the links, not by what two cores allow."""
LOOK_S = 0.05
TRIES = 8
"""How many times in a run a worker that ended by itself is started again, as any cluster manager would do."""
SYSTEMS = {
    "ours": (0, 1), "float32": (0, 1), "tls": (0, 1), "ddp": (), "torchft": (0,), "hivemind": (0,), "flower": (0,),
    "alone": (),
}  # fmt: skip
"""Name -> the workers on whose machines a service of the system runs (shards, lighthouse, first DHT node)."""
TORCHRUN = [
    "--nnodes={least}:{most}", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-backend=c10d", "--rdzv-id=versus",
    "--rdzv-conf=is_host={is_host}",
]  # fmt: skip
"""Options of torchrun. Its timeouts are the defaults."""


# ------------------------------------------------------------ machines

INSIDE = "eth0"
"""Name of the link's device on each machine."""


@dataclass(frozen=True)
class Link:
    """The link of each machine to the hub, the same in both directions."""

    rate: str
    burst: str
    delay_s: float = 0.0
    """Delay of the link, one way. Two machines are two links apart, so a round trip takes four times as long."""


LINKS = {"1gbit": Link("1gbit", "1mb"), "100mbit": Link("100mbit", "256kb"), "20mbit": Link("20mbit", "64kb", 0.01)}


class Machines:
    """`count` machines: network namespaces around a hub, each with the same link. Needs root.

    A link is a veth pair. If packets should take time, it is two TUN devices with a forwarder between them (`LongLink`
    of the fault tests). `tc tbf` shapes both ends. A process on a machine has a process namespace of its own, and
    everything that it starts dies with it. At the end, everything that was made is removed, also after a failure.
    """

    def __init__(self, count: int, link: Link, stack: ExitStack) -> None:
        self._link, self._stack = link, stack
        self._names = [f"versus-{os.getpid()}-{i}" for i in range(count)]
        self._hub = f"versus-{os.getpid()}-hub"
        self.hosts = tuple(f"10.77.{i + 1}.2" for i in range(count))
        self._hosts_file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "hosts")
        known = [("127.0.0.1", "localhost"), *((host, f"machine-{i}") for i, host in enumerate(self.hosts))]
        self._hosts_file.write_text("".join(f"{address} {name}\n" for address, name in known))
        for name in (self._hub, *self._names):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("nsenter", f"--net=/run/netns/{self._hub}", "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for i in range(count):
            self._plug_in(i)

    def command(self, machine: int, command: list[str]) -> list[str]:
        """A command that runs `command` on a machine. Killing it kills everything that it has started there."""
        return [
            "nsenter", f"--net=/run/netns/{self._names[machine]}",
            "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc",
            "bash", "-ec", 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"',
            f"machine-{machine}", str(self._hosts_file), *command,
        ]  # fmt: skip

    def sent_bytes(self) -> int:
        """Bytes that all machines together have sent onto their links so far."""
        shown = (json.loads(run("ip", "-s", "-j", "-n", name, "link", "show", INSIDE)) for name in self._names)
        return sum(int(found[0]["stats64"]["tx"]["bytes"]) for found in shown)

    def _plug_in(self, i: int) -> None:
        name, hub_end, machine_end = self._names[i], f"vh{i}", f"v{os.getpid()}m{i}"
        if self._link.delay_s:
            outside = f"v{os.getpid()}h{i}"
            line = LongLink(outside, machine_end, self._link.delay_s, 0.0, 0.0, seed=0)
            self._stack.callback(line.close)
            run("ip", "link", "set", outside, "netns", self._hub, "name", hub_end)
            run("ip", "link", "set", machine_end, "netns", name, "name", INSIDE)
        else:
            run(
                "ip", "-n", self._hub, "link", "add", hub_end, "type", "veth", "peer", "name", INSIDE, "netns", name
            )  # fmt: skip
        near, far = f"10.77.{i + 1}.1", f"10.77.{i + 1}.2"
        for where, device, address in ((self._hub, hub_end, near), (name, INSIDE, far)):
            run("ip", "-n", where, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", where, "link", "set", device, "up")
            shape = ("root", "tbf", "rate", self._link.rate, "burst", self._link.burst, "latency", "50ms")
            run("tc", "-n", where, "qdisc", "add", "dev", device, *shape)
        via = () if self._link.delay_s else ("via", near)
        run("ip", "-n", name, "route", "add", "default", "dev", INSIDE, *via)


# ------------------------------------------------------------ one run


@dataclass(frozen=True)
class Cell:
    system: str
    link: str
    case: str
    seed: int = 0

    @property
    def pace(self) -> int:
        """How many times as long everything takes, because more workers share the cores."""
        return WORKERS[self.case] // WORKERS["plain"]

    @property
    def name(self) -> str:
        return f"{self.system}/{self.link}/{self.case}" + (f"/seed {self.seed}" if self.seed else "")


@dataclass(frozen=True)
class Times:
    """The times of one run, in seconds."""

    warm: float = 10.0
    """Time from the first step that is not measured."""
    measured: float = 40.0
    kill_after: float = 10.0
    """Time from the beginning of the measurement to the kill."""
    away: float = 30.0
    """Time until the killed worker is started again. The measurement takes this much longer in such a run."""


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
        for rank in range(self._task.workers):
            self.start_worker(rank)

    def start_worker(self, rank: int) -> None:
        self._workers[rank] = self._start("worker", rank)

    def kill(self, rank: int) -> None:
        """Kill the worker and everything that it has started."""
        _end(self._workers.pop(rank))

    def tend(self) -> None:
        """Start workers again that have ended by themselves. Raises RuntimeError if there are too many."""
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
        script = [str(HERE / "versus_systems.py"), self._cell.system, role, str(number), str(self._path)]
        host = self._task.hosts[number]
        command = [self._python, *script]
        if self._cell.system == "ddp":
            workers = self._task.workers
            options = [o.format(is_host=int(number == 0), least=workers - 1, most=workers) for o in TORCHRUN]
            options += [f"--rdzv-endpoint={self._task.hosts[0]}:29400", f"--local-addr={host}"]
            command = [self._python, "-m", "torch.distributed.run", *options, *script]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": self._task.folder,
            "PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", ""))), "PYTHONWARNINGS": "ignore",
            "FLWR_TELEMETRY_ENABLED": "0",
        }  # fmt: skip
        with Path(self._task.folder, f"{role}-{number}.log").open("ab") as log:
            return subprocess.Popen(
                self._machines.command(number, command), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, cwd=self._task.folder,
            )  # fmt: skip


def run_cell(cell: Cell, python: str, times: Times, text: tuple[bytes, bytes]) -> dict[str, Any]:
    """The figures of one run, or what happened if it failed. `text`: the text to train on, and the held-out text."""
    workers = WORKERS[cell.case]
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="versus-", dir=base)))
        machines = Machines(workers, LINKS[cell.link], stack)
        for name, content in zip(("train.bin", "held.bin"), text, strict=True):
            Path(folder, name).write_bytes(content)
        task = Task(
            str(folder), machines.hosts, cell.link, step_s=workers * STEP_S,
            slow_rank=workers - 1 if cell.case == "slow" else -1, snapshot_s=cell.pace * Task.snapshot_s,
            seed=cell.seed,
        )  # fmt: skip
        if cell.system == "tls":
            names = [f"worker-{rank}" for rank in range(workers)]
            OwnCertificates(folder / CERTS, "local", SHARDS, names, machines.hosts).renew(0.0)
        cluster = Cluster(cell, task, python, machines)
        stack.callback(cluster.end)
        found: dict[str, Any] = {"system": cell.system, "link": cell.link, "case": cell.case, "seed": cell.seed}
        try:
            window = _run(cell, cluster, task, machines, times)
        except RuntimeError as error:
            return found | {"failed": str(error)}
        cluster.end()
        figures = versus_page.of_run(task, cell.case, window, cell.system)
        return found | figures | {"deaths": cluster.ended_by_themselves}


def _run(cell: Cell, cluster: Cluster, task: Task, machines: Machines, times: Times) -> versus_page.Window:
    cluster.start()
    folder, deadline = Path(task.folder), time.monotonic() + START_S
    while len(list(folder.glob("ready-*"))) < task.workers:
        cluster.tend()
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all workers are ready after {START_S:g} s: {cluster.last_words('worker')}")
        time.sleep(0.1)
    go = time.monotonic() + 0.5
    Path(folder, "go.tmp").write_text(str(go))
    Path(folder, "go.tmp").rename(folder / "go")
    last = task.workers - 1
    began = go + times.warm
    ended = began + times.measured + (times.away if cell.case == "killed" else 0.0)
    killed = began + times.kill_after if cell.case == "killed" else None
    due: list[tuple[float, Callable[[], None]]] = []
    if killed is not None:
        due = [(killed, lambda: cluster.kill(last)), (killed + times.away, lambda: cluster.start_worker(last))]
    _tend_until(began, cluster, [])
    sent, busy = machines.sent_bytes(), _busy_s()
    _tend_until(ended, cluster, due)
    back = killed and killed + times.away
    return versus_page.Window(began, ended, machines.sent_bytes() - sent, _busy_s() - busy, back)


def _tend_until(ended: float, cluster: Cluster, due: list[tuple[float, Callable[[], None]]]) -> None:
    """Tend the cluster until this time, and make each call in `due` at its time."""
    while (now := time.monotonic()) < ended:
        while due and now >= due[0][0]:
            due.pop(0)[1]()
        cluster.tend()
        time.sleep(LOOK_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _busy_s() -> float:
    """CPU seconds that all cores of this machine have spent since it started, including those of the kernel."""
    user, nice, system, _, _, irq, soft = (int(t) for t in Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    return float(user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------ all runs


def main() -> int:
    args = _arguments()
    if not args.page:
        if problem := _problem():
            print(problem, file=sys.stderr)
            return 2
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that machines and links are removed
        try:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
            _run_missing(args)
        except NotPossible as error:
            print(f"cannot make network namespaces and links on this machine: {error}", file=sys.stderr)
            return 2
    versus_page.write(read(RESULTS))
    return 0


def _run_missing(args: argparse.Namespace) -> None:
    done = set() if args.again else {Cell(r["system"], r["link"], r["case"], r["seed"]) for r in read(RESULTS)}
    text = _text()
    for cell in (Cell(s, link, case, args.seed) for link in args.links for case in args.cases for s in args.only):
        python = _python(cell.system, args.venvs)
        if cell in done or python is None:
            print(f"{cell.name}: {'done before' if cell in done else 'not installed, see --help'}", flush=True)
            continue
        load = os.getloadavg()[0]
        times = replace(args.times, warm=cell.pace * args.times.warm, measured=cell.pace * args.times.measured)
        result = run_cell(cell, python, times, text)
        result |= {
            "load_before": load,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "times": asdict(times),
        }
        result |= {"commit": COMMIT, "defaults": versus_page.defaults()}
        with RESULTS.open("a") as out:
            out.write(json.dumps(result) + "\n")
        print(versus_page.line(result), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The newest result of each cell, sorted by link, case, system and seed."""
    lines = path.read_text().splitlines() if path.exists() else []
    newest = {(r["link"], r["case"], r["system"], r["seed"]): r for r in ({"seed": 0} | json.loads(x) for x in lines)}
    order = [(link, case, system) for link in LINKS for case in WORKERS for system in SYSTEMS]
    return [newest[key] for key in sorted(newest, key=lambda key: (order.index(key[:3]), key[3]))]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare ours with its peers over real links.")
    parser.add_argument("--only", type=lambda t: t.split(","), default=[*SYSTEMS], help=",".join(SYSTEMS))
    parser.add_argument("--links", type=lambda t: t.split(","), default=[*LINKS], help=",".join(LINKS))
    parser.add_argument("--cases", type=lambda t: t.split(","), default=[*WORKERS], help=",".join(WORKERS))
    parser.add_argument("--venvs", type=Path, help="folder with an environment for each peer, VENVS/torchft ...")
    parser.add_argument("--again", action="store_true", help="also run cells that have a result")
    parser.add_argument("--seconds", type=float, default=Times.measured, help="measured in a run; default %(default)g")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial values and the text")
    parser.add_argument("--page", action="store_true", help="run nothing; only write page and picture")
    args = parser.parse_args()
    if unknown := {*args.only, *args.links, *args.cases} - {*SYSTEMS, *LINKS, *WORKERS}:
        parser.error(f"no such system, link or case: {', '.join(unknown)}")
    args.times = Times(measured=args.seconds)
    return args


def _problem() -> str:
    if os.geteuid() != 0:
        return "versus.py makes network namespaces and shapes links, which only root may: run it with sudo"
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if not shutil.which(tool)]
    return f"{', '.join(missing)} not found: install iproute2 and util-linux" if missing else ""


def _python(system: str, venvs: Path | None) -> str | None:
    if system not in PEERS:
        return sys.executable
    own = venvs and venvs / PEERS[system] / "bin" / "python"
    return str(own.absolute()) if own and own.exists() else None


def _text() -> tuple[bytes, bytes]:
    from diloco_demo.data import STDLIB, load_corpus

    corpus = load_corpus(STDLIB, held_out=0.05)
    return corpus.train.numpy().tobytes(), corpus.held_out.numpy().tobytes()


if __name__ == "__main__":
    sys.exit(main())
