"""Checks this machine: the disk of a data folder, open files, memory, kernels."""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from diloco_common import formulas, units
from diloco_common.formulas import BITS, LINK_SHARE
from diloco_common.settings import OVERLAP_STEPS, ShardSettings
from diloco_deploy.doctor import SLOW_S, TIMES, ReportLine, failure, ok, warning
from diloco_server.shell.quotas import CONNECTIONS_PER_LEARNER, ENOUGH, KEPT, connections_allowed, connections_wanted
from diloco_server.storage.filesystem import Disk, FileSystem

FILE_BYTES, MEASURE_S = 8 << 20, 2.0
"""Size of the files that are written in turn, and seconds after which no further file is started."""


class Written(NamedTuple):
    seconds: float
    """Median for one file: write, fsync, rename, fsync of the folder, as for a version."""
    num_bytes: int

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / max(self.seconds, 1e-6)

    def version_s(self, num_bytes: float) -> float:
        """Seconds for another size: never less than measured, and proportional for larger files."""
        return max(self.seconds, num_bytes / self.bytes_per_s)


class PlannedShard(NamedTuple):
    params: float
    fragments: int
    learners: int
    push: str
    pull: str
    outer: str
    every: int
    step_s: float
    checkpoints: int
    companions_every: int | None = None
    """`sync.companions_every` if the run averages momentum; otherwise None."""

    @property
    def version_bytes(self) -> int:
        """Bytes per parameter of the model."""
        return formulas.version_bytes(self.outer, self.pull)

    @property
    def companion_bytes(self) -> int:
        """Bytes per parameter of its companions."""
        return formulas.companion_bytes(self.pull) if self.companions_every else 0


def write(files: FileSystem, clock: Callable[[], float], num_bytes: int = FILE_BYTES) -> Written:
    """Write files as a shard does, and remove them. Raises OSError."""
    data = memoryview(os.urandom(1 << 20) * (num_bytes >> 20))
    took: list[float] = []
    began = clock()
    while len(took) < TIMES and (not took or clock() - began < MEASURE_S):
        at, temporary, name = clock(), "probe.tmp", "probe"
        try:
            file = files.create(temporary)
            try:
                file.write(data)
                file.sync()
            finally:
                file.close()
            files.rename(temporary, name)
            files.sync_names()
            took.append(clock() - at)
        finally:
            files.remove(temporary)
            files.remove(name)
    return Written(statistics.median(took), num_bytes)


def speed(folder: Path, shard: PlannedShard | None, clock: Callable[[], float]) -> ReportLine:
    """How fast versions become durable in a folder."""
    place = _nearest(folder)
    try:
        # Write in a private folder: in a shared one, another user may have put a link under the name.
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=place) as own:
            written = write(Disk(Path(own)), clock)
    except OSError as error:
        return failure("DISK_UNUSABLE", f"{place} cannot be written to: {error.strerror or error}")
    return fast_enough(folder, written, shard)


def fast_enough(folder: Path, written: Written, shard: PlannedShard | None) -> ReportLine:
    what = (
        f"{folder}: {units.size(written.num_bytes)} are durable after {written.seconds:.2g} s "
        f"({units.size(written.bytes_per_s)}/s)"
    )
    figures = {"sync_s": written.seconds, "bytes_per_s": written.bytes_per_s}
    if shard is None:
        if written.seconds > SLOW_S:
            return warning("DISK_SLOW", what, **figures)
        return ok(what, **figures)
    elements = shard.params / shard.fragments
    save_s = written.version_s(shard.version_bytes * elements)
    turn_s = save_s  # of a fragment and its companion
    if shard.companions_every:
        turn_s += written.version_s(shard.companion_bytes * elements) / shard.companions_every
    # Two threads write versions, one file each, so what counts is how long the disk is busy in all.
    busy = shard.fragments * turn_s / (shard.every * shard.step_s)
    what += f"; a version takes {save_s:.2g} s, and all of them {busy:.0%} of the time of H steps"
    if busy > 1:
        return failure("DISK_SLOW", what, **figures)
    if busy > LINK_SHARE or save_s > OVERLAP_STEPS * shard.step_s or written.seconds > SLOW_S:
        return warning("DISK_SLOW", what, **figures)
    return ok(what, **figures)


def room(folder: Path, shard: PlannedShard | None) -> ReportLine:
    place = _nearest(folder)
    try:
        free = float(Disk(place).free_bytes())
        used = (
            float(sum(entry.stat().st_size for entry in os.scandir(place) if entry.is_file())) if place == folder else 0
        )
    except OSError as error:
        return failure("DISK_UNUSABLE", f"{place} cannot be read: {error.strerror or error}")
    if shard is None:
        return ok(f"{folder}: {units.size(free)} free (give --params to check whether that is enough)", free_bytes=free)
    return enough_room(folder, free, used, shard)


def enough_room(folder: Path, free: float, used: float, shard: PlannedShard) -> ReportLine:
    """`used`: bytes of the shard's own files, which count as free."""
    each = shard.version_bytes + shard.companion_bytes
    needed = formulas.shard_disk(shard.params, shard.params / shard.fragments, each, shard.checkpoints)
    what = (
        f"{folder}: {units.size(free)} free, {units.size(used)} used; versions"
        f"{' and checkpoints' * bool(shard.checkpoints)} take {units.size(needed)}"
    )
    if needed > free + used:
        return failure("DISK_SMALL", what, free_bytes=free, needed_bytes=needed)
    return ok(what, free_bytes=free, needed_bytes=needed)


def _nearest(folder: Path) -> Path:
    """The folder, or its nearest existing parent: the shard creates the rest."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())


CGROUP = Path("/sys/fs/cgroup")


def files(settings: ShardSettings) -> ReportLine:
    """Check the limit of open files: a shard raises its own to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return enough_files(ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH), settings)


def enough_files(hard: int, settings: ShardSettings) -> ReportLine:
    wanted, allowed = connections_wanted(settings), connections_allowed(settings, hard)
    learners = allowed // CONNECTIONS_PER_LEARNER
    what = f"{hard} files may be open: enough for {learners} learners ({CONNECTIONS_PER_LEARNER} connections each)"
    if allowed >= wanted:
        return ok(what, files=hard)
    what += f"; shard.max_learners = {settings.max_learners} asks for {wanted + KEPT}"
    few = hard < KEPT + CONNECTIONS_PER_LEARNER * 4
    return (failure if few else warning)("FILES_FEW", what, files=hard)


def memory(shard: PlannedShard | None) -> ReportLine:
    return enough_memory(available_bytes(), shard)


def enough_memory(available: float, shard: PlannedShard | None) -> ReportLine:
    what = f"{units.size(available)} of memory is available"
    if shard is None:
        return ok(f"{what} (give --params to check whether that is enough)", available_bytes=available)
    needed = formulas.shard_memory(
        shard.params, shard.fragments, shard.learners, BITS.get(shard.push, 32.0), shard.outer, shard.pull,
        companions=shard.companions_every is not None,
    )  # fmt: skip
    what += f"; {units.count(shard.params)} parameters and {shard.learners} learners take {units.size(needed)}"
    if needed > available:
        return failure("MEMORY_SHORT", what, available_bytes=available, needed_bytes=needed)
    return ok(what, available_bytes=available, needed_bytes=needed)


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> float:
    """Memory for a new process: of the machine, or of the cgroup if that is less."""
    found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = 1024.0 * int(found["MemAvailable"].split()[0])
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), (cgroup / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else min(available, float(limit) - float(used))


def kernels() -> ReportLine:
    """Whether merging and encoding run in C. Imports torch."""
    from diloco_common.codec import native

    why = native.find()
    if not isinstance(why, str):
        return ok(f"native kernels: {native.origin()}")
    return warning("KERNELS_MISSING", f"no native kernels: {why}")
