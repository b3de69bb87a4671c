"""The folder of a local cluster: where addresses, logs, settings and results lie, and who may work in it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from diloco_common.errors import ConfigError, InUse


@dataclass(frozen=True)
class Outputs:
    """Where results go; none: into the folder of the cluster."""

    report: Path | None = None
    model: Path | None = None


class Files:
    """The folder of a cluster."""

    def __init__(self, folder: Path, outputs: Outputs) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.logs = folder / "logs"
        self.settings = folder / "settings.json"
        self.evaluation = folder / "evaluation.json"
        self.report = outputs.report or folder / "report.json"
        self.model = outputs.model or folder / "model.safetensors"

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Make the folders and hold them against a second `diloco up`."""
        try:
            for folder in (self.run, self.logs, self.report.parent, self.model.parent):
                folder.mkdir(parents=True, exist_ok=True)
            lock = (self.run / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from None
        with lock:
            self._lock(lock)
            yield

    def _lock(self, lock: TextIO) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise InUse(
                f"{self.folder} belongs to a running `diloco up` (pid {owner}); stop it or give another --folder"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()

    def clear(self, workers: int) -> None:
        """Take away what an earlier cluster left. Its versions lived in the memory of its shards, so the
        checkpoints of its workers belong to nothing any more."""
        self.clear_addresses()
        for path in (self.evaluation, *self.run.glob("*.final.json")):
            path.unlink(missing_ok=True)
        for index in range(workers):
            shutil.rmtree(self.worker_folder(index), ignore_errors=True)

    def clear_addresses(self) -> None:
        """Nobody is running any more."""
        for path in self.run.glob("*.json"):
            if not path.name.endswith(".final.json"):
                path.unlink(missing_ok=True)

    def worker_folder(self, index: int) -> Path:
        return self.folder / f"worker-{index}"

    def final_status(self, name: str) -> Path:
        return self.run / f"{name}.final.json"
