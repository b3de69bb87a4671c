"""A new user's five minutes with an installed product, timed: our column of docs/five-minutes.md.

    python benchmarks/five_minutes.py --bin ENVIRONMENT/bin          # minutes; the second machine takes root

Types what the page has typed, in an empty folder, with nothing of this checkout on the path: the first loss of the
built-in model, the page, a killed worker, a loop of one's own, a second machine in a network namespace, and how long
help and Ctrl-C take. Prints seconds from pressing Enter. Other work on the machine makes them longer: the load is
printed beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

from networks import Namespace

LIMIT_S = 300.0
HELPS, ENDS = 10, 5
LOOP = """\
import time

import torch
from torch import nn


def batch(generator):
    points = 2 * torch.rand(64, 2, generator=generator) - 1
    return points, (points[:, 0] * points[:, 1] > 0).long()


model = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(0)
for step in range(1000):
    points, label = batch(generator)
    loss = nn.functional.cross_entropy(model(points), label)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)  # stands for a larger model
    if step % 10 == 0:
        print(step, loss.item(), flush=True)
"""
"""The loop that a user has already: the same for everybody."""
LINES = (
    # instead of which line -> the new ones
    ("from torch import nn\n", "from torch import nn\n\nimport diloco_worker\n"),
    (
        "generator = torch.Generator().manual_seed(0)\n",
        'learner = diloco_worker.join("127.0.0.1:50051", model, run="local")\n'
        "generator = torch.Generator().manual_seed(learner.seed)\n",
    ),
    (
        "    optimizer.zero_grad()\n",
        "    optimizer.zero_grad()\n    learner.step(tokens=len(points), loss=loss)\n"
        "    if learner.done:\n        break\n",
    ),
)
END = "learner.finish()\n"
NUMBER = r"[\d.]+"


class Terminal:
    """Where somebody types, in a folder of theirs."""

    def __init__(self, folder: Path, programs: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        mine = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._environment = {**mine, "PATH": f"{programs}:{os.environ['PATH']}"}

    def type(self, command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self._environment, text=True, capture_output=True, check=False
        )
        return done.stdout

    @contextmanager
    def start(self, command: str, namespace: str = "") -> Iterator[Program]:
        """What goes on until its block ends; then it gets Ctrl-C."""
        words = ["ip", "netns", "exec", namespace] if namespace else []
        process = subprocess.Popen(
            [*words, "bash", "-c", f"exec {command}"], cwd=self.folder, env=self._environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        family = psutil.Process(process.pid)
        try:
            yield Program(process)
        finally:
            below = family.children(recursive=True) if family.is_running() else []
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                for each in (family, *below):
                    each.kill()


class Program:
    """What somebody reads meanwhile."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines, self._began = process, list[str](), time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def seconds_until(self, is_so: Callable[[], object], since: float | None = None) -> float:
        """From its start, or since then. Exits with what it said if that takes too long."""
        began = self._began if since is None else since
        while not _holds(is_so):
            if self.process.poll() is not None or time.monotonic() - began > LIMIT_S:
                sys.exit("".join(["it did not come to that:\n", *self.lines[-30:]]))
            time.sleep(0.1)
        return time.monotonic() - began

    def said(self, pattern: str) -> re.Match[str] | None:
        return next((found for line in list(self.lines) if (found := re.search(pattern, line))), None)


def _holds(is_so: Callable[[], object]) -> bool:
    """Whether it is so. What cannot be asked at the moment is not."""
    try:
        return bool(is_so())
    except OSError:
        return False


def answers(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=2) as answer:
        return bool(answer.status == 200)


def built_in(programs: Path, place: Path) -> Mapping[str, float]:
    """`diloco up`: the first loss, the page, and a worker that is killed."""
    here = Terminal(place, programs)
    seconds: dict[str, float] = {}
    run = here.folder / "runs/local"
    with here.start("diloco up") as up:
        seconds["first line"] = up.seconds_until(lambda: up.lines)
        up.seconds_until(lambda: up.said(r"http://\S+"))
        page = up.said(r"http://\S+")
        assert page is not None
        seconds["the page answers"] = up.seconds_until(lambda: answers(page[0]))
        seconds["a loss at the shards"] = up.seconds_until(lambda: losses(run))
        seconds["a loss on the terminal"] = up.seconds_until(lambda: up.said(rf"loss {NUMBER}"))
        up.seconds_until((run / "run/worker-0.json").exists)
        worker = json.loads((run / "run/worker-0.json").read_text())["pid"]
        before = merged(run)
        psutil.Process(worker).kill()
        killed = time.monotonic()
        seconds["more is merged after kill -9 of a worker"] = up.seconds_until(lambda: merged(run) > before, killed)
        seconds["the worker is back"] = up.seconds_until(lambda: is_back(run, worker), killed)
    return seconds


def status(run: Path) -> Mapping[str, object]:
    """Of shard 0, which is on this machine and speaks plaintext."""
    address = json.loads((run / "run/shard-0.json").read_text())["http"]
    with urllib.request.urlopen(f"http://{address}/status", timeout=5) as answer:
        found: Mapping[str, object] = json.load(answer)
    return found


def losses(run: Path) -> list[float]:
    learners = status(run).get("learners", [])
    assert isinstance(learners, list)
    return [each["loss"] for each in learners if each.get("loss") is not None]


def merged(run: Path) -> int:
    tokens = status(run)["tokens"]
    assert isinstance(tokens, dict)
    return int(tokens["merged"])


def is_back(run: Path, former: int) -> bool:
    """Another process has written down where it is, which it does once it holds the model."""
    path = run / "run/worker-0.json"
    return path.exists() and json.loads(path.read_text())["pid"] != former


def own_loop(programs: Path, place: Path) -> Mapping[str, float]:
    """A shard and two workers with somebody's own loop; `diloco init` would have written one."""
    here = Terminal(place, programs)
    loop = LOOP
    for line, instead in LINES:
        assert loop.count(line) == 1
        loop = loop.replace(line, instead)
    (here.folder / "train.py").write_text(loop + END)
    began = time.monotonic()
    with (
        here.start("diloco-server --listen 127.0.0.1:50051 --set run.tokens=10M") as shard,
        here.start("python train.py") as one,
        here.start("python train.py") as other,
    ):
        seconds = {"own loop: the first loss": one.seconds_until(lambda: one.said(rf"^0 {NUMBER}"), began)}
        other.seconds_until(lambda: other.said(rf"^0 {NUMBER}"))
        other.process.kill()
        killed, lines = time.monotonic(), len(one.lines)
        seconds["own loop: the other goes on after kill -9"] = one.seconds_until(lambda: len(one.lines) > lines, killed)
        assert shard.process.poll() is None
    return seconds


def second_machine(programs: Path, place: Path) -> Mapping[str, float]:
    """As docs/two-machines.md has it."""
    here, there = Terminal(place / "here", programs), Terminal(place / "there", programs)
    with Namespace() as far:
        far.plug_in()
        up = f"diloco up --workers 1 --folder runs/two --set shard.listen={far.near}:50051"
        with here.start(up) as first:
            first.seconds_until((here.folder / "runs/two/certs/shard-1/cert.pem").exists)
            here.type("diloco certs issue learner/there --folder runs/two/certs")
            shutil.copytree(here.folder / "runs/two/certs/learner-there", there.folder / "learner-there")
            first.seconds_until(lambda: first.said(rf"loss {NUMBER}"))
            join = f"diloco-worker --shards {far.near}:50051,{far.near}:50052 --tls learner-there"
            with there.start(join, far.name) as second:
                return {"the second machine trains": second.seconds_until(lambda: second.said(" training "))}


def waits(programs: Path, place: Path) -> Mapping[str, float]:
    """What people wait for again and again: help, and the end after Ctrl-C. The median and the longest of each."""
    here = Terminal(place, programs)
    helped, ended = [], []
    here.type("diloco --help")  # reads its files from the disk
    for _ in range(HELPS):
        began = time.monotonic()
        here.type("diloco --help")
        helped.append(time.monotonic() - began)
    for _ in range(ENDS):
        with here.start("diloco up --fresh") as up:
            up.seconds_until(lambda up=up: up.said(rf"loss {NUMBER}"))  # type: ignore[misc]
            up.process.send_signal(signal.SIGINT)
            began = time.monotonic()
            up.process.wait(LIMIT_S)
            ended.append(time.monotonic() - began)
    of = {f"--help, of {HELPS}": helped, f"Ctrl-C of diloco up, of {ENDS}": ended}
    return {
        f"{what}: {which}": seconds
        for what, all_s in of.items()
        for which, seconds in (("median", statistics.median(all_s)), ("longest", max(all_s)))
    }


PARTS = {"built-in": built_in, "own-loop": own_loop, "second-machine": second_machine, "waits": waits}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="the programs of the environment with the product")
    parser.add_argument("parts", nargs="*", help=f"default: {' '.join(PARTS)}")
    args = parser.parse_args()
    for name in args.parts or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            for what, seconds in PARTS[name](args.bin.resolve(), Path(folder, name)).items():
                print(f"{what:<45} {seconds:6.2f} s   (load {os.getloadavg()[0]:.0f})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
