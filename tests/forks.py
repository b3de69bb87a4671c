"""Processes that start at once: forked from a server that has imported everything.

A shard of one's own interpreter takes two seconds of a core to start and a worker six, nearly all of it for imports.
Whoever tests the start itself takes an interpreter (`processes.Process(own_interpreter=True)`, `diloco up`).
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from diloco_common.child import end_with_parent

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "diloco_server.server", "diloco_demo.training", "diloco_worker.joining", "torch._dynamo",
        "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    ]
)  # fmt: skip
"""What takes seconds to import; the first optimizer that steps would import torch._dynamo."""


class Forked:
    """A module that runs as a process, with what is used of subprocess.Popen. Started when made."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        given = (module, list(arguments), log, dict(environment))
        self._process = context.Process(target=_become, args=given, daemon=True)
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


def log_to(log: Path) -> None:
    """What this process writes goes to the end of this file, and it ends with its parent."""
    end_with_parent(os.getppid())
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(file, standard)


def _become(module: str, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    os.setsid()
    log_to(log)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
