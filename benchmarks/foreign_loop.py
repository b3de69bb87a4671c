"""A training script that somebody else wrote, with our lines put in, and its processes. Shared by bring_*.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SAID = 6000
"""Characters, from the end, of what a process said that failed."""


def changed(script: str, changes: Iterable[tuple[str, str]]) -> str:
    """With each of these texts replaced, which has to be in it once: a newer script may need other changes."""
    for old, new in changes:
        if script.count(old) != 1:
            raise SystemExit(f"the script has changed: {old!r} is in it {script.count(old)} times")
        script = script.replace(old, new)
    return script


@dataclass(frozen=True)
class Running:
    """A process of the script, and what it says."""

    process: subprocess.Popen[bytes]
    log: Path

    def ended(self) -> str:
        """Wait for it. All that it said; exits if it failed."""
        failed, said = self.process.wait(), self.log.read_text()
        if failed:
            raise SystemExit(said[-SAID:])
        return said


def begin(command: Sequence[str], folder: Path, log: Path, **environment: str) -> Running:
    """Run Python with this command, in that folder, on one thread."""
    with log.open("w") as out:
        environ = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        process = subprocess.Popen([sys.executable, *command], cwd=folder, env=environ, stdout=out, stderr=out)
    return Running(process, log)


def begin_ranks(
    ranks: int, script: str, arguments: Sequence[str], folder: Path, paths: Sequence[Path], **environment: str
) -> Running:
    """So many ranks of the script, by torchrun. `folder`: of this learner alone. `paths`: where its imports are."""
    (folder / "train.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py"]
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    return begin([*torchrun, *arguments], folder, folder / "log", PYTHONPATH=path, **environment)


def all_ended(running: Sequence[Running]) -> list[str]:
    """Wait for them. What each said; ends all and exits if one failed."""
    try:
        return [one.ended() for one in running]
    finally:
        for one in running:
            one.process.terminate()
