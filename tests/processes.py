"""Shards and workers as real processes of one test, on ports that they choose themselves.

Every process ends with the test that started it: `LocalCluster` kills what is left by process id, and the processes
follow their parent by themselves (`diloco_common.process`) should pytest be killed. What they do is asked over HTTP;
nothing here looks inside them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import forks
import waiting
from diloco_common.wire.addresses import Endpoints, read_address
from forks import Forked

Status = dict[str, Any]
T = TypeVar("T")

DEADLINE_S = 120.0
"""For things that take a second or two on a machine that is not busy."""
LOOK_EVERY_S = 0.05

TINY: dict[str, Any] = {
    "model.layers": 1,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 32,
    "train.batch": 4,
    "worker.step_min_s": 0.02,
    "worker.threads": 1,
    "sync.fragments": 4,
    "sync.sync_every": 8,
    "lease.lease_s": 2,
    "lease.heartbeat_s": 0.5,
}
"""A model and a cadence with which a lot happens in a second; the sleep in each step leaves the cores to the others."""

# Never through a proxy of the environment: these are our own processes.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def until(condition: Callable[[], T], what: str, seconds: float = DEADLINE_S) -> T:
    """The value of the condition once it is true; processes are slower, and asking them costs more."""
    return waiting.until(condition, what, seconds, LOOK_EVERY_S)


def sets(settings: Mapping[str, object]) -> list[str]:
    """The arguments that give these settings."""
    return [f"--set={name}={value}" for name, value in settings.items()]


def environment() -> dict[str, str]:
    """Of this process, without settings that somebody exported."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "COLUMNS": "120"}


def run_module(
    module: str,
    *arguments: str,
    timeout_s: float = DEADLINE_S,
    own_interpreter: bool = False,
    forks_children: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module` to its end: as a person would type it with an interpreter of its own, else forked."""
    if not own_interpreter:
        return forks.run(
            module, *arguments, environment=environment(), timeout_s=timeout_s, forks_children=forks_children
        )
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, timeout=timeout_s, env=environment(), stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


class Script:
    """A script that runs as a process of its own, forked. A context manager that kills it."""

    def __init__(self, text: str, *arguments: str, folder: Path) -> None:
        path, self._out, self._err = folder / "train.py", folder / "out", folder / "err"
        path.write_text(text)
        self._process = Forked(str(path), arguments, self._out, environment(), errors=self._err)
        self.send_signal, self.wait = self._process.send_signal, self._process.wait

    @property
    def out(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def err(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()


def http_get(address: str, path: str) -> tuple[int, str]:
    """Status code and text of an HTTP answer. Raises OSError where nobody answers."""
    try:
        with _opener.open(f"http://{address}{path}", timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


class Process:
    """One shard or worker; may be started again after it has ended."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Callable[[], Sequence[str]],
        folder: Path,
        *,
        own_interpreter: bool = False,
    ) -> None:
        """With an interpreter of its own it is started as `diloco up` does, else forked (forks.py)."""
        self.name = name
        self.address_file = folder / "run" / f"{name}.json"
        self.log = folder / "logs" / f"{name}.log"
        self._module, self._arguments, self._own_interpreter = module, arguments, own_interpreter
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._endpoints: Endpoints | None = None

    def start(self) -> None:
        assert not self.alive, f"{self.name} runs already"
        for file in (self.address_file, self.log):
            file.parent.mkdir(parents=True, exist_ok=True)
        arguments = [*self._arguments(), f"--address-file={self.address_file}"]
        if not self._own_interpreter:
            self._process = Forked(self._module, arguments, self.log, environment())
            return
        command = [sys.executable, "-m", "diloco_common.process", str(os.getpid()), self._module]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def endpoints(self) -> Endpoints:
        """Where it is reached, once it has said so in its present life; afterwards, where it was reached last."""
        if self._endpoints is None or (self.alive and self._endpoints.pid != self.pid):
            self._endpoints = until(self._find, f"the address of {self.name}; its log:\n{self.said()}")
        return self._endpoints

    def status(self) -> Status:
        """What it serves as /status. Raises OSError where it does not answer."""
        code, text = http_get(self.endpoints.http, "/status")
        assert code == 200, text
        return dict(json.loads(text))

    def said(self) -> str:
        """Everything that it logged, in all its lives."""
        return self.log.read_text() if self.log.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Repeating it is fine."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def exit_code(self, seconds: float = DEADLINE_S) -> int:
        """Wait until it ends by itself."""
        assert self._process is not None
        return self._process.wait(seconds)

    def _find(self) -> Endpoints | None:
        assert self.alive, f"{self.name} ended with {self._process and self._process.returncode}:\n{self.said()}"
        found = read_address(self.address_file)
        return found if found is not None and found.pid == self.pid else None


class Shard(Process):
    """A shard; its later lives have the ports of the first."""

    def __init__(
        self, name: str, settings: Mapping[str, object], folder: Path, *flags: str,
        own_interpreter: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(name, "diloco_server", self._given, folder, own_interpreter=own_interpreter)
        self.settings = dict(settings)
        self._flags = flags

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        try:
            return bool(self.status()["ready"])
        except OSError:
            return False

    def learner(self, name: str) -> Status:
        return learner_in(self.status(), name)

    def _given(self) -> list[str]:
        if self._endpoints is not None:
            self.settings |= {"shard.listen": self._endpoints.grpc, "shard.http": self._endpoints.http}
        return [*self._flags, *sets(self.settings)]


class LocalCluster:
    """Shards and workers of one run, in a folder laid out as `diloco up` does. A context manager that ends them all."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object] | None = None,
        *,
        keeps: bool = False,
        own_interpreter: bool = False,
    ) -> None:
        """Shards of a cluster that `keeps` have a data folder each, `data(index)`."""
        self.folder = folder
        self.own_interpreter = own_interpreter
        self._keeps = keeps
        self.settings = {**TINY, **(settings or {})}
        self.shards: list[Process] = []
        self.workers: dict[str, Process] = {}

    def start(self, shards: int, workers: Sequence[str], *, verbose: bool = False) -> Self:
        """Start everything, and return once every worker has contributed to a version of every shard.

        Shards that are verbose log every round.
        """
        for index in range(shards):
            self._add_shard(index, shards, ["--verbose"] if verbose else []).start()
        for name in workers:
            self.add_worker(name).start()
        for name in workers:
            until(lambda name=name: self.has_merged(name), f"a contribution of {name}")  # type: ignore[misc]
        return self

    def data(self, index: int) -> Path:
        """The data folder of a shard."""
        return self.folder / f"shard-{index}"

    def add_worker(self, name: str, settings: Mapping[str, object] | None = None) -> Process:
        """A worker with its own folder; not started yet."""
        given = {**self.settings, "worker.learner_id": name, "worker.folder": self.folder / name, **(settings or {})}

        def arguments() -> list[str]:
            return [f"--shards={','.join(shard.endpoints.grpc for shard in self.shards)}", *sets(given)]

        own = self.own_interpreter
        self.workers[name] = Process(name, "diloco_demo", arguments, self.folder, own_interpreter=own)
        return self.workers[name]

    @contextmanager
    def replaced(self, name: str, folder: Path) -> Iterator[Process]:
        """Another worker with the same learner id and a folder of its own; the old one is killed at the end."""
        old = self.workers[name]
        folder.mkdir()
        new = self.add_worker(name, {"worker.folder": folder})
        new.address_file = folder / "address.json"
        try:
            yield new
        finally:
            old.kill()

    def learner(self, name: str, shard: Process | None = None) -> Status:
        """What a shard (the first one) says of a learner."""
        return learner_in((shard or self.shards[0]).status(), name)

    def has_merged(self, name: str) -> bool:
        """Whether every shard has merged something of this learner."""
        return all(self.learner(name, shard).get("merged", 0) > 0 for shard in self.shards)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self.workers.values(), *self.shards):
            process.kill()

    def _add_shard(self, index: int, count: int, flags: Sequence[str]) -> Process:
        where: dict[str, object] = {"shard.index": index, "shard.count": count}
        if self._keeps:
            where["shard.data_dir"] = self.data(index)
        given = {**self.settings, **where}
        self.shards.append(Shard(f"shard-{index}", given, self.folder, *flags, own_interpreter=self.own_interpreter))
        return self.shards[-1]


def learner_in(status: Status, name: str) -> Status:
    """What the /status of a shard says of a learner; empty if it does not know it."""
    return next((learner for learner in status["learners"] if learner["id"] == name), {})


def versions(status: Status) -> dict[int, int]:
    """Fragment -> version, from the /status of a shard."""
    return {fragment["id"]: fragment["version"] for fragment in status["fragments"]}
