"""The disks that `diloco chaos --disk-full` fills. In a process of its own, because it mounts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
from diloco_deploy.chaos.damage import SmallDisks

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


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_a_disk_is_full_and_has_room_again_and_goes_with_its_process(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path / "disk")
    if "cannot be done here" in done.stderr:
        pytest.skip(f"small disks cannot be mounted here: {done.stderr.splitlines()[-1]}")
    assert done.stdout.splitlines() == ["No space left on device", "1000 1048576"], done.stderr
    assert list((tmp_path / "disk").iterdir()) == [], "the mount was in its process alone"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not mount")
def test_where_it_may_not_mount_it_says_so(tmp_path: Path) -> None:
    done = run(SCRIPT.replace("folder =", "import os; os.setuid(65534)\nfolder ="), tmp_path / "disk")
    assert done.returncode == 1
    assert "--disk-full cannot mount its small disks here (Operation not permitted)" in done.stderr
