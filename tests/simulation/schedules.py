"""Schedules in which one kind of thing goes wrong again and again: each brings out what a guard is there for."""

from __future__ import annotations

from dataclasses import replace

from diloco_simulator.options import Options, draw_memory, draw_short


def hard_on_disks(seed: int, **changes: object) -> Options:
    """Shards crash, files are damaged, and little else goes wrong."""
    settings = {
        "disks": (True,) * 3, "interval_s": 0.0, "save_s": 0.1, "quorum": 1, "sync_every": 1, "budget": 0,
        "faults": ("crash shard", "crash shard", "hurt file"), "faults_from_s": 1.5, "faults_s": 5.0,
    }  # fmt: skip
    return replace(draw_short(seed), **(settings | changes))


def without_disks(seed: int, **changes: object) -> Options:
    """Shards crash, and have lost everything when they come back."""
    return hard_on_disks(seed, **({"disks": (), "faults": ("crash shard",)} | changes))


def emptied(seed: int) -> Options:
    """Data folders are emptied while their shards are down."""
    return hard_on_disks(seed, faults=("wipe disk", "crash shard"))


def written_at_intervals(seed: int) -> Options:
    """Versions are announced before they are written, and shards crash."""
    return hard_on_disks(seed, interval_s=1.0, quorum="all")


def killed_while_writing(seed: int) -> Options:
    """Shards crash all the time, and writes take long."""
    return hard_on_disks(seed, faults=("crash shard",), save_s=0.3, fault_every_s=0.2)


def killed_and_hanging(seed: int) -> Options:
    """Shards crash while learners hang, with many fragments."""
    return hard_on_disks(seed, faults=("crash shard", "hang learner"), fragments=6, fault_every_s=0.15)


def refusing_disks(seed: int) -> Options:
    """Disks are full or fail, and shards crash."""
    return hard_on_disks(seed, faults=("fill disk", "crash shard"), fault_every_s=0.2)


def forgetful(seed: int) -> Options:
    """Shards forget at once who has no lease."""
    return replace(draw_short(seed), forgets=True, budget=0)


def replacing(seed: int, **changes: object) -> Options:
    """Learners freeze, and others take their places."""
    settings = {"faults": ("replace frozen learner",), "fault_every_s": 0.2, "faults_s": 5.0, "budget": 0}
    return replace(draw_short(seed), **(settings | changes))


def evicting(seed: int) -> Options:
    """Learners lose their leases while their contributions wait in open rounds."""
    return replace(
        draw_short(seed), faults=("freeze learner", "cut"), quorum="all", fault_every_s=0.15, faults_s=5.0, budget=0,
        lease_s=1.0, on_commit="carry",
    )  # fmt: skip


def resuming(seed: int) -> Options:
    """Learners crash and go on from old checkpoints, shards are away for long."""
    settings = {
        "faults": ("crash learner", "crash learner", "crash shard"), "fault_every_s": 0.3, "faults_from_s": 1.5,
        "faults_s": 6.0, "resumes": 1.0, "budget": 0, "on_commit": "carry",
    }  # fmt: skip
    return replace(draw_short(seed), **settings)


def lossy(seed: int, **changes: object) -> Options:
    """Connections break, messages are lost, late and twice; processes live."""
    settings = {
        "faults": ("break calls", "cut", "cut one way"), "loss": 0.2, "duplicates": 0.2, "long_delays": 0.05,
        "fault_every_s": 0.1, "faults_s": 4.0, "budget": 0,
    }  # fmt: skip
    return replace(draw_short(seed), **(settings | changes))


def slow_codec(seed: int) -> Options:
    """Snapshots take longer than a step, and versions arrive meanwhile."""
    return replace(draw_memory(seed), codec_s=1.0, on_commit="carry", quorum=1, sync_every=2)


def forgetting_divergence(seed: int) -> Options:
    """Values are not finite, and shards forget at once who has lost its lease meanwhile."""
    return lossy(
        seed, faults=("not finite", "freeze learner", "break calls"), forgets=True, on_commit="carry", quorum=1,
        faults_s=6.0,
    )  # fmt: skip


def diverging(seed: int) -> Options:
    """Values are not finite now and then, and rounds wait for everybody."""
    return replace(
        draw_memory(seed), faults=("not finite",), fault_every_s=0.5, quorum="all", loss=0.0, long_delays=0.0,
        progress_timeout_s=0.0, norm_factor=1000.0, budget=0,
    )  # fmt: skip
