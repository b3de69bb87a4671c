"""Schedules in which one kind of thing goes wrong again and again: each brings out what a guard is there for."""

from __future__ import annotations

from dataclasses import replace

from diloco_simulator.lies import AS_OTHERS, FOREIGN, PUSHES
from diloco_simulator.options import Options, draw_memory, draw_short, with_hostile


def short(seed: int) -> Options:
    """A short schedule of single processes with one kind of fragments, in which nobody lies."""
    return replace(draw_short(seed), hostile=0, islands=0, companions_every=0, has_buffer=False, sickness=None)


def memory(seed: int) -> Options:
    """A long schedule without disks in which nobody lies."""
    return replace(draw_memory(seed), hostile=0)


def hard_on_disks(seed: int, **changes: object) -> Options:
    """Shards crash, files are damaged, and little else goes wrong."""
    settings = {
        "disks": (True,) * 3, "save_s": 0.1, "quorum": 1, "sync_every": 1, "budget": 0,
        "faults": ("crash shard", "crash shard", "hurt file"), "faults_from_s": 1.5, "faults_s": 5.0,
    }  # fmt: skip
    return replace(short(seed), **(settings | changes))


def without_disks(seed: int, **changes: object) -> Options:
    """Shards crash, and have lost everything when they come back."""
    return hard_on_disks(seed, **({"disks": (), "faults": ("crash shard",)} | changes))


def emptied(seed: int) -> Options:
    """Data folders are emptied while their shards are down."""
    return hard_on_disks(seed, faults=("wipe disk", "crash shard"))


def killed_and_hanging(seed: int) -> Options:
    """Shards crash while learners hang, with many fragments."""
    return hard_on_disks(seed, faults=("crash shard", "hang learner"), fragments=6, fault_every_s=0.15)


def forgetful(seed: int) -> Options:
    """Shards forget at once who has no lease, and learners are cut off for a while, again and again."""
    faults = ("freeze learner", "break calls", "cut")
    return replace(short(seed), forgets=True, budget=0, faults=faults, faults_s=8.0, fault_every_s=1.0)


def replacing(seed: int, **changes: object) -> Options:
    """Learners freeze, and others take their places."""
    settings = {"faults": ("replace frozen learner",), "fault_every_s": 0.2, "faults_s": 5.0, "budget": 0}
    return replace(short(seed), **(settings | changes))


def evicting(seed: int) -> Options:
    """Learners lose their leases while their contributions wait in open rounds."""
    return replace(
        short(seed), faults=("freeze learner", "cut"), quorum="all", fault_every_s=0.15, faults_s=5.0, budget=0,
        lease_s=1.0,
    )  # fmt: skip


def resuming(seed: int) -> Options:
    """Learners crash and go on from old checkpoints, shards are away for long."""
    settings = {
        "faults": ("crash learner", "crash learner", "crash shard"), "fault_every_s": 0.3, "faults_from_s": 1.5,
        "faults_s": 6.0, "resumes": 1.0, "budget": 0,
    }  # fmt: skip
    return replace(short(seed), **settings)


def leaving(seed: int, *others: str) -> Options:
    """Learners leave with warning again and again, long before H steps are over; and other things go wrong."""
    settings = {
        "faults": ("warn learner", *others), "fault_every_s": 0.4, "faults_s": 8.0, "budget": 0,
        "sync_every": 30,
    }  # fmt: skip
    return replace(short(seed), **settings)


def lossy(seed: int, **changes: object) -> Options:
    """Connections break, messages are lost, late and twice; processes live."""
    settings = {
        "faults": ("break calls", "cut", "cut one way"), "loss": 0.2, "duplicates": 0.2, "long_delays": 0.05,
        "fault_every_s": 0.1, "faults_s": 4.0, "budget": 0,
    }  # fmt: skip
    return replace(short(seed), **(settings | changes))


def late(seed: int) -> Options:
    """Rounds wait for nobody, so many contributions come too late, and encoding loses much."""
    return replace(
        short(seed), push="int4", quorum=1, grace=0.0, staleness_max=0, sync_every=1, delay_s=0.06,
        faults=(), budget=0, faults_s=4.0,
    )  # fmt: skip


def losing_ranks(seed: int, **changes: object) -> Options:
    """Ranks of islands die again and again, while rounds wait for everybody and the network is slow."""
    settings = {
        "learners": 4, "islands": 2, "faults": ("lose rank",), "fault_every_s": 0.6, "faults_s": 10.0, "quorum": "all",
        "grace": 0.5, "delay_s": 0.1, "sync_every": 1, "budget": 0,
        "disks": (),
    }  # fmt: skip
    return replace(short(seed), **(settings | changes))


def diverging_ranks(seed: int) -> Options:
    """Islands in which one rank's values are not finite now and then. Answers take long, so rounds ask again before."""
    return losing_ranks(
        seed, learners=2, faults=("not finite",), fault_every_s=0.3, faults_s=15.0, quorum=2, lease_s=1.0, call_s=6.0,
        long_delays=0.1, loss=0.05,
    )  # fmt: skip


def forgetting_ranks(seed: int) -> Options:
    """Calls of islands break, and shards forget at once who has lost its lease meanwhile."""
    return losing_ranks(seed, faults=("not finite", "freeze learner", "break calls"), forgets=True, quorum=1, loss=0.1)


def slow_codec(seed: int) -> Options:
    """Encoding takes longer than a step, and versions arrive meanwhile."""
    return replace(memory(seed), codec_s=1.0, quorum=1, sync_every=2)


def forgetting_divergence(seed: int) -> Options:
    """Values are not finite, and shards forget at once who has lost its lease meanwhile."""
    return lossy(
        seed, faults=("not finite", "freeze learner", "break calls"), forgets=True, quorum=1,
        faults_s=6.0,
    )  # fmt: skip


def diverging(seed: int) -> Options:
    """Values are not finite now and then, and rounds wait for everybody."""
    return replace(
        memory(seed), faults=("not finite",), fault_every_s=0.5, quorum="all", loss=0.0, long_delays=0.0,
        budget=0,
    )  # fmt: skip


def hostile(seed: int, count: int = 1, *, identities_proven: bool = True, **changes: object) -> Options:
    """Hostile learners beside honest ones, and nothing else goes wrong."""
    settings = {
        "faults": (), "loss": 0.0, "long_delays": 0.0, "duplicates": 0.0, "budget": 0,
        "faults_s": 4.0, "quorum": 1,
    }  # fmt: skip
    drawn = with_hostile(short(seed), count, identities_proven=identities_proven)
    return replace(drawn, **(settings | changes))


def claiming(seed: int) -> Options:
    """They say that their contributions are of any number of tokens and steps."""
    return hostile(seed, 2, tactics=("claim",), manners=("honest",))


def hasty(seed: int) -> Options:
    """They report a thousand steps at a time, and contribute."""
    return hostile(seed, tactics=("contribute",), manners=("fast",), sync_every=200, faults_s=8.0)


def lingering(seed: int) -> Options:
    """Most learners report steps that take for ever, and rounds wait for as long as a step takes."""
    return hostile(seed, 8, tactics=("pull",), manners=("slow",), answers=0.7, grace="adaptive")


def crowding(seed: int) -> Options:
    """They hold pushes open, more than the shard takes at once."""
    return hostile(seed, 2, tactics=("hold pushes",), manners=("honest",), max_pushes=16)


def twisting(seed: int) -> Options:
    """Their contributions are flipped, scaled, not finite, or of other bytes."""
    return hostile(seed, 2, tactics=PUSHES, manners=("honest",), quorum=2, learners=5)


def impersonating(seed: int) -> Options:
    """They speak as others, where one token is every identity."""
    return hostile(seed, 2, identities_proven=False, tactics=(*FOREIGN, AS_OTHERS), manners=("honest",))


def silent(seed: int) -> Options:
    """The same, and they contribute nothing themselves: whoever was asked beside them has lost its lease since."""
    return replace(impersonating(seed), answers=0.0, tactics=FOREIGN)
