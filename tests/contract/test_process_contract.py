"""What a process has of its machine: memory, ports, systemd that watches it, and children that it forks."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import diloco_worker
from diloco_common import forks
from diloco_common.errors import InUse, WrongCall
from diloco_common.observe import http
from diloco_common.wire.addresses import bind_socket, bound_address
from diloco_worker.shell import process as children

HOLES = """
import ctypes, json, mmap
from pathlib import Path
from diloco_common.process import MIB, trim, tune_allocator

tune_allocator()
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
chunks = [bytes(2 * MIB + i) for i in range(40)]
filled = resident()
del chunks[::2]
freed = resident()
trim()
print(json.dumps([filled - freed, freed - resident()]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="libc is not a recent glibc")
def test_holes_between_chunks_are_given_back_when_they_are_said_to_be_of_no_use():
    out = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True).stdout
    by_itself, given_back = json.loads(out)
    assert by_itself < 10 * 2**20 < 30 * 2**20 < given_back, "20 of 40 chunks of 2 MiB were freed"


def test_a_port_in_use_is_reported_with_the_process_that_has_it():
    with bind_socket("127.0.0.1:0") as first:
        address = str(bound_address(first))

        with pytest.raises(InUse) as refused:
            bind_socket(address)

    assert address in str(refused.value)
    if os.path.exists("/proc/net/tcp"):
        assert f"process {os.getpid()} (" in str(refused.value)


def test_systemd_hears_from_a_process_for_as_long_as_it_makes_progress(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(0.0)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "4000", "WATCHDOG_PID": str(os.getpid())}
        looks = [True, True, False, True]

        def is_alive() -> bool:
            if not looks:
                raise EOFError
            return looks.pop(0)

        with pytest.raises(EOFError):
            asyncio.run(http.feed_watchdog(is_alive, environ))
        assert [systemd.recv(64) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        with pytest.raises(BlockingIOError):
            systemd.recv(64)


def test_importing_and_joining_leave_the_random_numbers_of_the_script_alone(serve) -> None:
    code = (
        "import random, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "random.seed(1)\n"
        "before = random.getstate(), torch.get_rng_state()\n"
        "import diloco_worker\n"
        f"diloco_worker.join('{serve().address}', model, wait_s=30).close()\n"
        "assert random.getstate() == before[0]\n"
        "assert torch.equal(torch.get_rng_state(), before[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cell_that_is_run_again_takes_the_place_of_what_it_has_joined(serve) -> None:
    """Of a notebook, without a name: the learner that it made before leaves, and is nobody else's doing."""
    shard = serve()
    first = diloco_worker.join(shard.address, nn.Linear(2, 2), wait_s=20)
    again = diloco_worker.join(shard.address, nn.Linear(2, 2), wait_s=20)
    with again:
        assert first.state == "stopped"
        assert again.learner_id == first.learner_id
        again.step(tokens=1)


FORK = """
{first}
import os, threading
from diloco_common import forks
from diloco_common.errors import ForkUnsafe
forks.refuse(True)
try:
    pid = os.fork()
except ForkUnsafe as error:
    forks.refuse(False)
    print("refused:", error)
    pid = os.fork()
else:
    print("not refused")
finally:
    if pid == 0:
        os._exit(0)
    print("forked", os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize(
    ("first", "variable", "said"),
    [
        ("import diloco_worker, grpc", "", "not refused"),
        ("import grpc", "0", "not refused"),
        ("import grpc", "", "refused: grpc was imported before diloco_worker"),
        ("import diloco_worker, grpc", "1", "refused: GRPC_ENABLE_FORK_SUPPORT=1 is set"),
    ],
)
def test_a_fork_that_would_die_is_refused(first: str, variable: str, said: str) -> None:
    environment = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": variable}
    ended = subprocess.run(
        [sys.executable, "-c", FORK.format(first=first)],
        capture_output=True, text=True, env=environment, check=False, timeout=60,
    )  # fmt: skip
    assert ended.stdout.startswith(said), ended.stderr
    assert ended.stdout.endswith("forked 0\n"), ended.stderr


def in_a_fork(call: Callable[[], None]) -> str:
    """The code that a forked child hears; "" if the call returns."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except WrongCall:
            os._exit(3)
        finally:
            os._exit(4)
    return {3: WrongCall.code}.get(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "")


def test_a_forked_child_neither_calls_the_learner_nor_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_first_join", None)
    home = children.Home()
    home.check("a")
    assert home.is_here
    assert in_a_fork(lambda: home.check("a")) == "WRONG_CALL"

    assert in_a_fork(lambda: children.check_may_join("r", "b")) == ""
    children.check_may_join("r", "a")
    children.check_may_join("r", "a")
    assert in_a_fork(lambda: children.check_may_join("r", "b")) == "WRONG_CALL"


def test_a_forked_child_does_not_keep_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        forks.close_in_children(listening)
        held = listening.fileno()
        assert in_a_fork(lambda: _check_is_closed(held)) == "WRONG_CALL"


def _check_is_closed(held: int) -> None:
    try:
        os.fstat(held)
    except OSError:
        raise WrongCall("closed") from None
