"""SIGTERM while there is nothing to hand over: a process starts, waits for others, or for a disk that hangs."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import Process, Script, http_get, until

ENDS_S = 60.0
"""Against hanging, on any machine. It takes one or two; containers are killed after 30."""

HUNG_DISK = """
import sys, threading
from diloco_server import __main__ as cli
from diloco_server.shell import server
from diloco_server.shell.host import ShardHost
server.LAST_WRITE_S = 0.1
async def recover(self):
    self.keeper._threads.submit(threading.Event().wait)
ShardHost.recover = recover
sys.exit(cli.main(["--set=shard.data_dir=" + sys.argv[1], "--listen=127.0.0.1:0", "--http=127.0.0.1:0"]))
"""
"""A shard whose disk never gets done with a write."""


@pytest.fixture
def absent() -> Iterator[str]:
    """An address at which nobody will listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def process(program: str, folder: Path, *arguments: str, own_interpreter: bool = False) -> Process:
    for part in ("run", "logs"):
        (folder / part).mkdir()
    given = [*arguments, "--http=127.0.0.1:0"]
    return Process("one", program, lambda: given, folder, own_interpreter=own_interpreter)


def catches_sigterm(pid: int) -> bool:
    """Whether the process has a handler, which it gets before it imports torch."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("module", ["diloco_server", "diloco_demo"])
def test_a_process_ends_while_it_starts(tmp_path: Path, module: str, absent: str) -> None:
    shards = [f"--shards={absent}"] * (module == "diloco_demo")
    one = process(module, tmp_path, *shards, own_interpreter=True)
    one.start()
    try:
        until(lambda: catches_sigterm(one.pid), "a handler")
        one.signal(signal.SIGTERM)
        assert one.exit_code(ENDS_S) == 0
        assert one.said() == ""
    finally:
        one.kill()


def test_a_worker_ends_while_it_waits_for_shards(tmp_path: Path, absent: str) -> None:
    worker = process("diloco_demo", tmp_path, f"--shards={absent}", "--learner-id=ann")
    worker.start()
    try:
        code, text = http_get(worker.endpoints.http, "/readyz")
        assert (code, absent in text) == (503, True)
        worker.signal(signal.SIGTERM)
        assert worker.exit_code(ENDS_S) == 0
        assert "Traceback" not in worker.said()
    finally:
        worker.kill()


def test_a_shard_ends_whatever_its_disk_does(tmp_path: Path) -> None:
    """reliability.md 7: threads are waited for at the end of a process, and this one would be waited for for ever."""
    with Script(HUNG_DISK, str(tmp_path / "data"), folder=tmp_path) as shard:
        until(lambda: "serving" in shard.out + shard.err, "it to serve")
        shard.send_signal(signal.SIGTERM)
        assert shard.wait(ENDS_S) == 0
        assert "a write to the data folder hangs" in shard.err


CATCHES_ALL = """
import os, signal
from diloco_common.command import end_on_sigterm
end_on_sigterm()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except BaseException:
    pass
print("goes on", flush=True)
"""
"""What some of torch's imports do; a shard of ours once went on to serve after its SIGTERM."""


def test_an_import_that_catches_everything_does_not_keep_the_process_alive() -> None:
    ended = subprocess.run([sys.executable, "-c", CATCHES_ALL], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")
