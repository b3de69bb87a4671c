"""Processes that start at once: forked from a server that has imported everything.

A shard of one's own interpreter takes two seconds of a core to start and a worker six, nearly all of it for imports.
Whoever tests the start itself takes an interpreter (`processes.Process(own_interpreter=True)`, `diloco up`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import IO, Any

from diloco_common.process import end_with_parent

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "diloco_server.shell.server", "diloco_demo.training", "diloco_worker.joining", "torch._dynamo",
        "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    ]
)  # fmt: skip
"""What takes seconds to import; the first optimizer that steps would import torch._dynamo."""


def get_ready() -> None:
    """Start the server now, with the environment as it is: what is forked later has what preloading makes of it."""
    (first := context.Process(target=int)).start()  # it has imported everything once this has begun
    first.join()


class Forked:
    """A module or script that runs as a process, with what is used of subprocess.Popen. Started when made."""

    def __init__(
        self, program: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], *,
        errors: Path | None = None, folder: Path | None = None, forks_children: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            program: a module, or the path of a script.
            log: what it writes goes to the end of this file.
            errors: what it writes to stderr goes here instead.
            folder: where it runs.
            forks_children: children of its `Supervisor` start at once, too.
        """
        become = _Become(str(program), list(arguments), dict(environment), log, errors, folder, forks_children)
        self._process = context.Process(target=become, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class Answering:
    """A function that goes on in a process of its own, and answers over a pipe. Started when made."""

    ANSWER_S = 120.0

    def __init__(self, name: str, log: Path, target: Callable[..., None], *given: object) -> None:
        """It is called with what is given, its end of the pipe, and the log."""
        self.name, self.log = name, log
        self._near, far = context.Pipe()
        self._process = context.Process(target=target, args=(*given, far, log), daemon=True)
        self._process.start()

    def ask(self, what: str = "report") -> Any:
        """Raises AssertionError if it has ended."""
        try:
            self._near.send(what)
            if self._near.poll(self.ANSWER_S):
                return self._near.recv()
        except (EOFError, OSError):
            pass
        raise AssertionError(f"{self.name} does not answer; its log:\n{self.log.read_text()}")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def ranks(
    count: int, target: Callable[..., None], *arguments: object, environment: Mapping[str, str]
) -> Iterator[list[ForkServerProcess]]:
    """Processes that call target(their environment, *arguments), with the variables that torchrun gives to ranks.

    torchrun itself takes ten seconds of two cores for its imports and theirs.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count)}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": str(count)}
    started = [
        context.Process(target=target, args=({**given, "RANK": str(i), "LOCAL_RANK": str(i)}, *arguments), daemon=True)
        for i in range(count)
    ]
    try:
        for process in started:
            process.start()
        yield started
    finally:
        for process in started:
            process.kill()


def run(
    program: str, *arguments: str, environment: Mapping[str, str], folder: Path | None = None, timeout_s: float = 120.0,
    forks_children: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a module or a script to its end, and say how it ended. Raises TimeoutExpired."""
    with TemporaryDirectory() as said:
        out, err = Path(said, "out"), Path(said, "err")
        process = Forked(program, arguments, out, environment, errors=err, folder=folder, forks_children=forks_children)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess([program, *arguments], code, out.read_text(), err.read_text())


def log_to(log: Path, errors: Path | None = None) -> None:
    """What this process writes goes to the ends of these files, and it ends with its parent."""
    end_with_parent(os.getppid())
    for standard, path in ((1, log), (2, errors or log)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, standard)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


@dataclass
class _Become:
    program: str
    arguments: list[str]
    environment: dict[str, str]
    log: Path
    errors: Path | None
    folder: Path | None
    forks_children: bool

    def __call__(self) -> None:
        os.setsid()
        log_to(self.log, self.errors)
        os.environ.clear()
        os.environ.update(self.environment)
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
        if self.folder is not None:
            os.chdir(self.folder)
        sys.argv = [self.program, *self.arguments]
        if self.forks_children:
            from diloco_deploy.run import supervisor

            supervisor.subprocess = SimpleNamespace(Popen=_Child, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
        _run_to_the_end(self.program)


def _run_to_the_end(program: str) -> None:
    """As an interpreter does, also with what nobody has caught."""
    try:
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


class _Child:
    """A child of a `Supervisor` that is forked from it, with what is used of subprocess.Popen."""

    def __init__(self, command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: object) -> None:
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                code = _as_after_exec(command[command.index("diloco_common.process") + 1 :], stdout.fileno(), env)
            finally:
                os._exit(code)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _as_after_exec(arguments: Sequence[str], log: int, environment: Mapping[str, str]) -> int:
    """Leave behind what exec would: files, handlers of signals, variables. Then run the child; its exit code."""
    gc.freeze()  # what belongs to the parent must not close files of ours
    os.setsid()
    for standard, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, standard)
    os.closerange(3, 4096)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    parent_pid, module, *others = arguments
    end_with_parent(int(parent_pid))
    sys.argv = [module, *others]
    try:
        _run_to_the_end(module)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
