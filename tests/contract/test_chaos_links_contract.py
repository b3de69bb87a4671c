"""The links that `diloco chaos` cuts. In a process of its own, because it enters a network namespace."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import socket
from diloco_deploy.chaos.damage import Links, NoLinks

try:
    links = Links()
except NoLinks as why:
    raise SystemExit(f"not here: {why}")
shards = [socket.create_server(("0.0.0.0", 0)) for _ in range(2)]
ports = [shard.getsockname()[1] for shard in shards]

def reached(worker):
    found = []
    for port in ports:
        try:
            socket.create_connection((Links.host(worker), port), timeout=0.3).close()
            found.append(True)
        except TimeoutError:
            found.append(False)
    return found

print(reached(0), reached(1))
links.cut(0, ports[1])
print(reached(0), reached(1))
links.heal(0, ports[1])
print(reached(0), reached(1))
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)


def test_a_link_that_is_cut_is_that_of_one_worker_and_one_shard_until_it_is_healed() -> None:
    done = run(SCRIPT)
    if "not here" in done.stderr:
        pytest.skip(f"links cannot be cut here: {done.stderr.splitlines()[-1]}")
    assert done.stdout.splitlines() == [
        "[True, True] [True, True]",
        "[True, False] [True, True]",
        "[True, True] [True, True]",
    ], done.stderr


def test_the_namespace_goes_with_its_process() -> None:
    mine = os.readlink("/proc/self/ns/net")
    done = run(SCRIPT + "\nimport os\nprint(os.readlink('/proc/self/ns/net'))")
    if "not here" in done.stderr:
        pytest.skip(f"links cannot be cut here: {done.stderr.splitlines()[-1]}")
    assert done.stdout.splitlines()[-1] != mine
    assert os.readlink("/proc/self/ns/net") == mine


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not")
def test_where_it_may_not_it_says_so() -> None:
    done = run(SCRIPT.replace("try:", "import os; os.setuid(65534)\ntry:", 1))
    assert done.returncode == 1
    assert "not here: " in done.stderr
