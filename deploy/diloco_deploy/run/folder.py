"""The folder of a local cluster: addresses, logs, settings, results, its lock, and its shards' data."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TextIO

from diloco_common.command import NOT_WRITTEN, check_outputs, disk_errors
from diloco_common.errors import BadCheckpoint, CannotConnect, ConfigError, InUse
from diloco_common.settings import Settings
from diloco_common.settings_loader import load_saved
from diloco_common.wire.addresses import dialable, read_address
from diloco_deploy.trust.tending import OwnCertificates


@dataclass(frozen=True)
class Outputs:
    """Paths of the results; None: in the cluster's folder."""

    report: Path | None = None
    model: Path | None = None


_IDENTITY: dict[str, tuple[str, ...]] = {
    "run": ("id", "seed"),
    "sync": ("fragments",),
    "outer": ("optimizer",),
    "shard": ("data_dir",),
    "model": (),
    "train": ("average_momentum",),
    "data": (),
    "cluster": ("shards",),
}
"""Settings that must not change when a run is resumed: section -> keys; empty: all keys."""


class ClusterFolder:
    def __init__(self, folder: Path, outputs: Outputs, data: Path | None = None) -> None:
        """`data`: the parent of the shards' data folders, if not `folder`."""
        self.folder = folder
        self.data = data or folder
        self.run = folder / "run"
        self.logs = folder / "logs"
        self.certs = folder / "certs"
        """The cluster's own certificate authority, if it needs one."""
        self.settings = folder / "settings.json"
        self._where = folder / "where"
        self.evaluation = folder / "evaluation.json"
        self.evaluated = self.run / "evaluated.json"
        self.report = outputs.report or folder / "report.json"
        self.model = outputs.model or folder / "model.safetensors"

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Make the folders, and lock them against a second `diloco up`."""
        with disk_errors(ConfigError, NOT_WRITTEN):
            for folder in (self.run, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            check_outputs(self.report, self.model)
            lock = (self.run / "lock").open("a+", encoding="utf-8")
        with lock:
            self._lock(lock)
            try:
                yield
            finally:
                lock.truncate(0)  # another process may get this process id later

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

    def prepare(self, settings: Settings, *, fresh: bool) -> bool:
        """Remove leftovers of an earlier start. Returns whether there is a run to continue.

        With `fresh`, the run starts over. Raises ConfigError if the folder holds another run.
        """
        self.clear_addresses()
        for path in (self.evaluation, *self.run.glob("*.final.json")):
            path.unlink(missing_ok=True)
        shards, workers = numbered(self.data, "shard"), numbered(self.folder, "worker")
        is_resumed = not fresh and (self.holds_versions or self._held_versions_elsewhere())
        if is_resumed:
            self.check(settings)
        else:  # without versions, the checkpoints of workers are useless
            left = [path for shard in shards for path in sorted(shard.glob("checkpoints/*/checkpoint.json"))]
            if left and not fresh:  # a user may want to restore one
                raise ConfigError(
                    f"{self.folder} holds checkpoints ({left[-1].parent}) but no versions. To continue from one, use "
                    "`diloco restore`; to delete them and start anew, use --fresh"
                )
            with disk_errors():
                for path in (*shards, *workers):
                    _remove(path)
        return is_resumed

    @property
    def holds_versions(self) -> bool:
        return _hold_versions(self.data)

    def _held_versions_elsewhere(self) -> bool:
        """Whether the run in the folder has its versions in another data folder; `check` then refuses."""
        if self.is_on_ray or not self.settings.exists():
            return False
        return _hold_versions(anchored(load_saved(self.settings).settings).shard.data_dir or self.folder)

    @property
    def is_on_ray(self) -> bool:
        """Whether the run was last started on a Ray cluster."""
        return self._where.exists() and self._where.read_text(encoding="utf-8").strip() == "ray"

    def runs(self, where: Literal["here", "ray"]) -> None:
        self._where.write_text(where + "\n", encoding="utf-8")

    def check(self, settings: Settings) -> None:
        """Raises ConfigError if the run in the folder has other settings."""
        if not self.settings.exists():
            return
        mine = anchored(settings).model_dump(mode="json")
        theirs = anchored(load_saved(self.settings).settings).model_dump(mode="json")
        names = [(section, key) for section, keys in _IDENTITY.items() for key in keys or mine[section]]
        lines = [
            f"{section}.{key}: {theirs[section][key]} <-> {mine[section][key]}"
            for section, key in names
            if mine[section][key] != theirs[section][key]
        ]
        if lines:
            raise ConfigError(
                f"{self.folder} holds another run (its settings <-> these):\n  "
                + "\n  ".join(lines)
                + "\ngive the settings of that run, another --folder, or --fresh to delete the run and start anew"
            )

    def clear_addresses(self) -> None:
        """Remove all address files. Call it when no process is running."""
        for path in self.run.glob("*.json"):
            if not path.name.endswith(".final.json"):
                path.unlink(missing_ok=True)

    def worker_folder(self, index: int) -> Path:
        return self.folder / f"worker-{index}"

    def shard_folder(self, index: int) -> Path:
        return self.data / f"shard-{index}"

    def final_status(self, name: str) -> Path:
        return self.run / f"{name}.final.json"


def anchored(settings: Settings) -> Settings:
    """The settings with absolute paths, so that a command started elsewhere reads them the same way."""
    sections = {}
    for name in type(settings).model_fields:
        section = getattr(settings, name)
        paths: dict[str, object] = {key: value.absolute() for key, value in section if isinstance(value, Path)}
        if name == "data" and section.source != "stdlib":
            paths["source"] = str(Path(section.source).expanduser().absolute())
        sections[name] = section.model_copy(update=paths)
    return settings.model_copy(update=sections)


def is_owned(folder: Path) -> bool:
    """Whether the process that last locked a cluster's folder is alive."""
    try:
        owner = int((folder / "run" / "lock").read_text(encoding="utf-8"))
        if owner == os.getpid():  # the owner was in another container, or ran before a reboot
            return False
        os.kill(owner, 0)
    except PermissionError:
        return True  # it is alive, and belongs to another user
    except (OSError, ValueError, OverflowError):
        return False
    return True


def shown(path: Path) -> str:
    """A path as a user would type it here."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path != here and path.is_relative_to(here) else path))


def _hold_versions(data: Path) -> bool:
    return any(any(shard.glob("fragment-*")) for shard in numbered(data, "shard"))


def numbered(folder: Path, name: str) -> list[Path]:
    """The folders NAME-0, NAME-1, ... in a folder."""
    found = [path for path in folder.glob(f"{name}-*") if path.is_dir() and re.fullmatch(rf"{name}-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix(f"{name}-")))


def existing(folder: Path) -> Path:
    """Raises BadCheckpoint if it does not exist."""
    if not folder.is_dir():
        raise BadCheckpoint(f"there is no folder {folder}")
    return folder


def shard_folders(folder: Path) -> list[Path]:
    """The data folders shard-0, shard-1, ... of the `diloco up` cluster in `folder`."""
    saved = folder / "settings.json"
    return numbered((load_saved(saved).settings.shard.data_dir if saved.exists() else None) or folder, "shard")


# ---------------------------------------------------------------- its shards


class LocalShards(NamedTuple):
    """How to reach the shards of `diloco up` in a folder: addresses, run and certificate. No shard is asked."""

    addresses: tuple[str, ...]
    run: str
    tls: Path | None
    """Folder of an observer's certificate, if the cluster made one."""


def shards_in(folder: Path) -> LocalShards:
    """The shards of the cluster in a folder. Raises CannotConnect if none is up."""
    found = [read_address(path) for path in sorted((folder / "run").glob("shard-*.json"))]
    addresses = tuple(dialable(one.grpc) for one in found if one is not None)
    if not addresses:
        raise CannotConnect(f"no shards are up in {folder}; start them with `diloco up`, or name the shards (--shards)")
    run = load_saved(folder / "settings.json").settings.run.id
    return LocalShards(addresses, run, OwnCertificates.observer_in(folder))


def _remove(folder: Path) -> None:
    """Remove a folder and its contents, but not a volume mounted there. Raises ConfigError for a link, and OSError."""
    if folder.is_symlink():
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is a link, and its target is not deleted: empty it by hand, and start again")
        return
    for path in folder.iterdir():
        if path.name == "lost+found":  # belongs to root, in a volume's file system
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    with suppress(OSError):
        folder.rmdir()
