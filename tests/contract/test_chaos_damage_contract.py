"""The disks that `diloco_chaos --disk-full` fills and the links that it cuts: in processes of their own.

They mount, and enter a network namespace.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DISKS = """
import sys
from pathlib import Path
from diloco_chaos.damage import SmallDisks

folder = Path(sys.argv[1])
disks = SmallDisks({"shard-0": folder})
(folder / "before").write_bytes(bytes(1000))
disks.fill("shard-0")
try:
    (folder / "more").write_bytes(bytes(1))
except OSError as error:
    print(error.strerror)
disks.free("shard-0")
(folder / "after").write_bytes(bytes(1 << 20))
print((folder / "before").stat().st_size, (folder / "after").stat().st_size)
"""


def run(script: str, *folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_a_disk_is_full_and_has_room_again_and_goes_with_its_process(tmp_path: Path) -> None:
    done = run(DISKS, tmp_path / "disk")
    if "cannot be done here" in done.stderr:
        pytest.skip(f"small disks cannot be mounted here: {done.stderr.splitlines()[-1]}")
    assert done.stdout.splitlines() == ["No space left on device", "1000 1048576"], done.stderr
    assert list((tmp_path / "disk").iterdir()) == [], "the mount was in its process alone"


LINKS = """
import socket
from diloco_chaos.damage import Links, NoLinks

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


def test_a_link_that_is_cut_is_that_of_one_worker_and_one_shard_until_it_is_healed() -> None:
    done = run(LINKS)
    if "not here" in done.stderr:
        pytest.skip(f"links cannot be cut here: {done.stderr.splitlines()[-1]}")
    assert done.stdout.splitlines() == [
        "[True, True] [True, True]",
        "[True, False] [True, True]",
        "[True, True] [True, True]",
    ], done.stderr
