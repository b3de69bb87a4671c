"""A machine of ours: open files, memory, kernels."""

from __future__ import annotations

import resource
from pathlib import Path

from diloco_common.settings import ShardSettings
from diloco_deploy import units
from diloco_deploy.doctor.disk import Shard
from diloco_deploy.doctor.finding import Finding, failure, ok, warning
from diloco_deploy.plan import formulas
from diloco_deploy.plan.formulas import BITS
from diloco_server.shell.quotas import CONNECTIONS_PER_LEARNER, ENOUGH, KEPT, connections_allowed, connections_wanted

CGROUP = Path("/sys/fs/cgroup")


def files(settings: ShardSettings) -> Finding:
    """Open files that a shard may have here: it raises its own limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return enough_files(ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH), settings)


def enough_files(hard: int, settings: ShardSettings) -> Finding:
    """Whether so many open files serve all learners."""
    wanted, allowed = connections_wanted(settings), connections_allowed(settings, hard)
    learners = allowed // CONNECTIONS_PER_LEARNER
    what = f"{hard} files may be open: enough for {learners} learners ({CONNECTIONS_PER_LEARNER} connections each)"
    if allowed >= wanted:
        return ok(what, files=hard)
    what += f"; shard.max_learners = {settings.max_learners} asks for {wanted + KEPT}"
    few = hard < KEPT + CONNECTIONS_PER_LEARNER * 4
    return (failure if few else warning)("FILES_FEW", what, files=hard)


def memory(shard: Shard | None) -> Finding:
    """Whether the memory will do."""
    return enough_memory(available_bytes(), shard)


def enough_memory(available: float, shard: Shard | None) -> Finding:
    what = f"{units.size(available)} of memory are available"
    if shard is None:
        return ok(f"{what} (--params says whether that is enough)", available_bytes=available)
    needed = formulas.shard_memory(
        shard.params, shard.fragments, shard.learners, BITS.get(shard.push, 32.0), shard.outer, shard.pull,
        companions=shard.companions_every is not None,
    )  # fmt: skip
    what += f"; {units.count(shard.params)} parameters and {shard.learners} learners take {units.size(needed)}"
    if needed > available:
        return failure("MEMORY_SHORT", what, available_bytes=available, needed_bytes=needed)
    return ok(what, available_bytes=available, needed_bytes=needed)


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> float:
    """What a new process can have: of the machine, or of the cgroup if that is less."""
    found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = 1024.0 * int(found["MemAvailable"].split()[0])
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), (cgroup / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else min(available, float(limit) - float(used))


def kernels() -> Finding:
    """Whether merging and encoding run in C. Imports torch."""
    from diloco_common.codec import native

    why = native.find()
    if not isinstance(why, str):
        return ok(f"native kernels: {native.origin()}")
    return warning("KERNELS_MISSING", f"no native kernels: {why}")
