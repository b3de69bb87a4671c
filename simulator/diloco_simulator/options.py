"""The options of a schedule: everything that varies, drawn from the seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from diloco_common.settings import (
    GuardSettings,
    LeaseSettings,
    OuterSettings,
    RunSettings,
    Settings,
    ShardSettings,
    SyncSettings,
)
from diloco_server.core.influence import TOLD
from diloco_simulator.lies import FOREIGN, MANNERS, SPOILS, TACTICS, Sickness
from diloco_worker.shell.boundary import SEED_HOLD_S

FAULTS = (
    "crash learner", "freeze learner", "replace frozen learner", "hang learner", "crash shard", "drain shard",
    "freeze shard", "cut", "cut one way", "break calls", "not finite",
)  # fmt: skip
DISK_FAULTS = ("fill disk", "hurt file", "wipe disk")
SOMETIMES = 0.3
"""How often things happen that happen only sometimes, as a share of the occasions."""
MANY = 200
"""Number of fragments in schedules that have very many."""
SUM = OuterSettings(optimizer="sgd", lr=1.0, momentum=0.0)
OUTER = (
    SUM,
    OuterSettings(),
    OuterSettings(lr=0.4, momentum=0.9),
    OuterSettings(optimizer="sgd", lr=0.8, momentum=0.6),
    OuterSettings(optimizer="adam", lr=0.3),
    OuterSettings(lr=0.9, momentum=0.2),
)
_DEFAULTS = Settings()


@dataclass(frozen=True)
class Options:
    """One schedule. Times in virtual seconds."""

    seed: int
    shards: int
    learners: int
    fragments: int
    sync_every: int
    quorum: int | Literal["all"]
    grace: float | Literal["adaptive"]
    staleness_max: int
    merge: Literal["rda", "mean", "agreement"]
    push: Literal["float32", "bfloat16", "int8", "int4"]
    pull: Literal["float32", "bfloat16", "int8", "int4"]
    budget: int
    """Tokens; 0: no end."""
    lease_s: float
    step_s: tuple[float, ...]
    tick_s: float
    """Interval between two ticks of a shard's core."""
    compute_s: float
    """Mean time of a job of a shard's compute thread."""
    codec_s: float
    """Mean time of a job of a learner's codec thread: a snapshot, an encoding."""
    stutters: float
    """Probability that a learner's clock jumps within a step boundary, so that it applies fewer versions there."""
    resumes: float
    """Share of restarted learners that resume from one of their checkpoints, of any age."""
    max_pushes: int
    """Pushes that a shard accepts at once; others are answered BUSY."""
    call_s: float
    delay_s: float
    long_delays: float
    """Share of messages that take very long, before the faults end."""
    loss: float
    duplicates: float
    faults_s: float
    fault_every_s: float
    faults: tuple[str, ...]
    disks: tuple[bool, ...]
    """For each shard, whether it has a disk; without one it serves from memory. Empty: none has."""
    save_s: float
    family: str = "memory"
    outer: OuterSettings = SUM
    """The outer optimizer. With hostile learners it is SUM, since values must count tokens."""
    faults_from_s: float = 0.0
    starts_s: float = 2.0
    """All learners are started within this time."""
    heartbeat_s: float = 1.0
    forgets: bool = False
    """Whether shards forget learners without a lease at once, as they would if far too many came and went."""
    companions_every: int = 0
    """Factor by which the companion, one parameter of the model, is due less often; 0: no companion."""
    has_buffer: bool = False
    islands: int = 0
    """Number of learners that are islands of several ranks: the first ones."""
    mirrors: bool = False
    """Whether each shard has a mirror at the learners' site. Mirrors die, lag and lie."""
    standbys: bool = False
    """Whether each shard with a disk has a standby. It is promoted; the old shard may live on for some learners."""
    sickness: Sickness | None = None
    """One member of three or more whose contributions are spoiled for a while. Of two, nobody can say which is right.
    Schedules with islands have no sick member, as no rank holds a whole contribution. Nor do schedules with companions
    or buffers, which are not compared, or with strangers, where hostile learners already spoil their contributions."""
    hostile: int = 0
    """Number of hostile learners, in addition to the honest ones."""
    identities_proven: bool = True
    """Whether callers can use only their own learner ids, as with mTLS. If not, hostile learners also use others'."""
    tactics: tuple[str, ...] = ()
    answers: float = 1.0
    """Probability that they contribute to a round that opens."""
    manners: tuple[str, ...] = ("honest",)
    """Ways in which they report; each usually sticks to one."""
    look_every_s: float = 1.0
    """Interval between looks at the cluster: they check whether it is well, and restart what has ended."""

    @property
    def name(self) -> str:
        """FAMILY:SEED. From it, `draw` draws the same options again."""
        return f"{self.family}:{self.seed}"

    @property
    def well_within_s(self) -> float:
        """Longest time after the end of faults until the cluster is well and has reached its budget."""
        slowest_s = 1.2 * max(self.step_s)
        rounds_s = 6 * (self.sync_every * max(1, self.companions_every) + 4) * slowest_s
        if self.sickness is not None:  # the sick member is compared until it takes part again
            rounds_s += 3 * TOLD * self.shards / self.fragments * (self.sync_every + 4) * slowest_s
        holds_s = SEED_HOLD_S if self.resumes else 0.0
        return 4 * self.lease_s + 4 * self.call_s + 20 + holds_s + rounds_s + 2 * self.budget * slowest_s

    @property
    def learners_max(self) -> int:
        """Maximum number of learner ids that may hold a lease at once."""
        honest_or_not = self.learners + self.hostile
        return honest_or_not if self.identities_proven else _DEFAULTS.shard.max_learners

    @cached_property
    def settings(self) -> tuple[Settings, ...]:
        return tuple(self._settings(index) for index in range(self.shards))

    def _settings(self, shard_index: int) -> Settings:
        sections = {
            "run": RunSettings(tokens=self.budget),
            "sync": SyncSettings(
                fragments=self.fragments, sync_every=self.sync_every, quorum=self.quorum, grace=self.grace,
                staleness_max=self.staleness_max, merge=self.merge, push=self.push,
                pull=self.pull, companions_every=max(1, self.companions_every),
            ),
            "outer": self.outer,
            "guard": GuardSettings(trust="strangers" if self.hostile else "members"),
            "lease": LeaseSettings(lease_s=self.lease_s, heartbeat_s=self.heartbeat_s),
            "shard": ShardSettings(index=shard_index, count=self.shards, max_pushes=self.max_pushes),
        }  # fmt: skip
        return _DEFAULTS.model_copy(update=sections)  # the sections are validated already; this does not validate again


def draw_short(seed: int) -> Options:
    """A short schedule of 3 shards and 5 learners. It tests values little, but everything else a lot.

    Times are a third of those in `draw_options`, and faults come three times as fast.
    """
    r = random.Random(f"short {seed}")
    lease_s = r.uniform(1.0, 1.2)
    pace_s = r.uniform(0.25, 0.4)
    budget = r.choice((0, 0, 0, 0, 0, r.randint(10, 24)))
    drawn = replace(
        _draw_honest(seed),
        family="short",
        shards=3,
        learners=5,
        fragments=r.choice((3, 3, 3, 3, 3, 4)),
        sync_every=r.choice((1, 1, 2, 2)),
        quorum=r.choice((1, 1, 2, 2, "all")),
        grace=r.choice((0.0, 0.1, 0.5, "adaptive", "adaptive")),
        pull=r.choice(("float32", "bfloat16", "int8", "int4")),
        budget=budget,
        lease_s=lease_s,
        heartbeat_s=0.5,
        step_s=tuple(pace_s * r.choice((1.0, r.uniform(0.7, 1.4), r.uniform(1.0, 2.0))) for _ in range(5)),
        compute_s=r.choice((0.002, 0.01, 0.03)),
        codec_s=pace_s * r.choice((0.02, 0.1, 0.5)),
        stutters=r.choice((0.0, 0.0, 0.3)),
        call_s=r.uniform(0.6, 1.0),
        delay_s=r.choice((0.002, 0.01, 0.06)),
        faults_from_s=r.choice((0.0, 0.6)),
        faults_s=r.uniform(1.0, 1.6),
        fault_every_s=r.uniform(0.12, 0.3),
        starts_s=0.3,
        tick_s=0.35,
        look_every_s=0.2,
        disks=(),
        faults=tuple(kind for kind in FAULTS if r.random() < 0.5),
    )
    return _with_sick(_with_many(_with_kind(_with_hostile(_with_disks(drawn, r, pace_s)))))


def draw_options(seed: int) -> Options:
    """A long schedule. Three out of four have disks."""
    drawn = replace(_draw_honest(seed), family="long")
    return _with_hostile(_with_disks(drawn, random.Random(f"disks {seed}"), min(drawn.step_s)))


def draw_memory(seed: int) -> Options:
    """A long schedule without disks."""
    return _with_hostile(_draw_honest(seed))


def _draw_honest(seed: int) -> Options:
    """Each schedule leaves out about half of the kinds of faults, so that each kind sometimes comes alone."""
    r = random.Random(f"options {seed}")
    shards, learners = r.choice((1, 1, 2, 2, 3)), r.choice((1, 2, 2, 3, 3, 4, 5))
    fragments = min(6, shards + r.choice((0, 0, 1, 1, 2, 3, 5)))
    lease_s = r.uniform(2.5, 6.0)
    pace_s = r.uniform(0.4, 1.0)
    drawn = Options(
        seed=seed,
        shards=shards,
        learners=learners,
        fragments=fragments,
        sync_every=r.randint(1, 8),
        quorum=r.choice((1, 1, 2, "all")),
        grace=r.choice((0.0, 0.3, 1.5, "adaptive", "adaptive")),
        staleness_max=r.choice((0, 1, 8, 8)),
        merge=r.choice(("rda", "mean", "agreement")),
        push=r.choice(("float32", "int8")),
        pull=r.choice(("float32", "float32", "bfloat16")),
        budget=r.choice((0, 0, 0, r.randint(30, 150))),
        lease_s=lease_s,
        step_s=tuple(pace_s * r.choice((1.0, r.uniform(0.7, 1.5), r.uniform(1.0, 3.0))) for _ in range(learners)),
        tick_s=0.25,
        compute_s=r.choice((0.005, 0.02, 0.04)),
        codec_s=pace_s * r.choice((0.02, 0.1, 0.3, 0.5)),
        stutters=r.choice((0.0, 0.0, 0.3)),
        resumes=r.choice((0.0, 0.5, 0.9)),
        max_pushes=r.choice((1, 2, 64, 64)),
        call_s=r.uniform(3.0, 8.0),
        delay_s=r.choice((0.002, 0.03, 0.2)),
        long_delays=r.choice((0.0, 0.01, 0.05)),
        loss=r.choice((0.0, 0.02, 0.1)),
        duplicates=r.choice((0.0, 0.02, 0.2)),
        faults_s=r.uniform(5.0, 15.0),
        fault_every_s=r.uniform(0.6, 3.0),
        faults=tuple(kind for kind in FAULTS if r.random() < 0.5),
        disks=(),
        save_s=0.0,
    )
    changes: Literal["int8", "int4"] | None = random.Random(f"pull {seed}").choice((None, None, None, "int8", "int4"))
    return replace(drawn, pull=changes) if changes else drawn  # drawn separately, so other draws of a seed stay as is


def _with_disks(drawn: Options, r: random.Random, pace_s: float) -> Options:
    """Three out of four schedules have disks, some of them only for part of the shards."""
    if r.random() < 0.25:
        return drawn
    some = r.random() < 0.25
    return replace(
        drawn,
        disks=tuple(not some or r.random() < 0.5 for _ in range(drawn.shards)),
        save_s=pace_s * r.choice((0.02, 0.1, 0.5)),
        faults=(*drawn.faults, *(kind for kind in DISK_FAULTS if r.random() < 0.3)),
    )


def _with_hostile(drawn: Options) -> Options:
    """A quarter of the schedules have one or two hostile learners. Drawn separately, so other draws of a seed stay.

    There are at least as many honest learners as the quorum that a round waits for.
    """
    r = random.Random(f"hostile {drawn.seed}")
    hostile = r.choice((0, 0, 0, 0, 0, 0, 1, 2))
    return with_hostile(drawn, hostile, identities_proven=r.random() < 0.7) if hostile else _with_rules(drawn)


def _with_rules(drawn: Options) -> Options:
    """All merge and step rules, and sometimes a much slower learner. Drawn separately, without hostile learners."""
    r = random.Random(f"rules {drawn.seed}")
    step_s = list(drawn.step_s)
    if r.random() < 0.2:
        step_s[r.randrange(len(step_s))] *= r.choice((3.0, 5.0))
    merge = drawn.merge if r.random() < 0.7 else "mean"
    faults = (*drawn.faults, "warn learner") if r.random() < 0.2 else drawn.faults
    return replace(drawn, outer=r.choice(OUTER), merge=merge, step_s=tuple(step_s), faults=faults)


def _with_kind(drawn: Options) -> Options:
    """Some short schedules have islands, or companions and perhaps a buffer. Both also have families of their own."""
    r = random.Random(f"kind {drawn.seed}")
    kind = r.choice(("", "", "", "islands", "companions"))
    if drawn.hostile or not kind:
        return drawn
    if kind == "islands":
        return replace(drawn, islands=r.randint(1, 2), max_pushes=64, faults=(*drawn.faults, "lose rank"))
    return replace(drawn, companions_every=r.choice((1, 2)), has_buffer=r.random() < 0.5, max_pushes=64)


def _with_many(drawn: Options) -> Options:
    """Some schedules have hundreds of fragments and two learners. Such a schedule takes as long as fifty others."""
    r = random.Random(f"many {drawn.seed}")
    if drawn.hostile or r.random() >= 0.01:
        return drawn
    return replace(
        drawn, shards=2, learners=2, fragments=MANY, sync_every=60, step_s=drawn.step_s[:2], disks=drawn.disks[:2],
        quorum=r.choice((1, 2, "all")), islands=min(drawn.islands, 1),
    )  # fmt: skip


def _with_sick(drawn: Options) -> Options:
    """Some short schedules have a sick member."""
    is_sick = random.Random(f"falls sick {drawn.seed}").random() < 0.08
    others = drawn.hostile or drawn.islands or drawn.companions_every or drawn.fragments == MANY
    return with_sick(drawn) if is_sick and not others else drawn


def with_sick(drawn: Options) -> Options:
    """The same schedule with a sick member, many fragments, fast threads and few faults, so that it is often found."""
    r = random.Random(f"sick {drawn.seed}")
    learners, shards = r.choice((2, 3, 3, 4, 4, 5, 5, 5, 18)), r.choice((1, 1, 1, 2))
    from_s, lasts_s = r.uniform(0.5, 2.0), r.uniform(3.0, 8.0)
    return replace(
        drawn, learners=learners, shards=shards, fragments=8 * shards, sync_every=r.choice((1, 1, 1, 2)),
        sickness=Sickness(r.randrange(learners), r.choice(("flipped", *SPOILS)), from_s, from_s + lasts_s),
        quorum=r.choice((2, min(3, learners), "all", "all")), grace=r.choice((0.5, "adaptive", "adaptive")),
        staleness_max=8,
        push=r.choice(("float32", "int8", "int4")), step_s=(min(drawn.step_s),) * learners,
        disks=drawn.disks[:shards], codec_s=0.005, compute_s=0.005, save_s=min(drawn.save_s, 0.005), long_delays=0.0,
        loss=r.choice((0.0, 0.0, 0.02)), resumes=0.0,  # else first versions would wait for learners that may hold more
        fault_every_s=r.choice((2.0, 8.0, 60.0)), faults_s=from_s + lasts_s + r.uniform(0.5, 2.0),
        hostile=0, islands=0, companions_every=0, has_buffer=False, budget=0, max_pushes=64,
    )  # fmt: skip


def with_hostile(drawn: Options, hostile: int, *, identities_proven: bool = True) -> Options:
    """The same schedule with hostile learners, each without half of the tactics."""
    r = random.Random(f"tactics {drawn.seed}")
    known = TACTICS if identities_proven else (*TACTICS, *FOREIGN)
    wanted = drawn.learners if drawn.quorum == "all" else drawn.quorum
    return replace(
        drawn, hostile=hostile, identities_proven=identities_proven, quorum=min(wanted, 2, drawn.learners),
        outer=SUM, islands=0, companions_every=0, has_buffer=False, sickness=None,
        max_pushes=_DEFAULTS.shard.max_pushes, staleness_max=_DEFAULTS.sync.staleness_max,
        tactics=tuple(t for t in known if r.random() < 0.5) or known, manners=tuple(r.sample(MANNERS, 3)),
    )  # fmt: skip


def draw_islands(seed: int) -> Options:
    """Long and short schedules with one or more islands, whose ranks may die, too."""
    r = random.Random(f"islands {seed}")
    drawn = draw_short(seed) if r.random() < 0.7 else draw_options(seed)
    return replace(
        drawn, family="islands", islands=r.randint(1, drawn.learners), hostile=0, max_pushes=64,
        companions_every=0, has_buffer=False, sickness=None,
        faults=(*drawn.faults, "lose rank", "lose rank"),
    )  # fmt: skip


def draw_companions(seed: int) -> Options:
    """Long and short schedules in which learners average a companion, and perhaps have a buffer."""
    r = random.Random(f"companions {seed}")
    drawn = draw_short(seed) if r.random() < 0.7 else draw_options(seed)
    return replace(
        drawn, family="companions", companions_every=r.choice((1, 1, 2, 3)), has_buffer=r.random() < 0.5, hostile=0,
        max_pushes=64, islands=0, sickness=None,
    )  # fmt: skip


def draw_mirrored(seed: int) -> Options:
    """Short schedules with mirrors that lie, standbys that are promoted, or both."""
    r = random.Random(f"mirrored {seed}")
    drawn = replace(
        draw_short(seed), family="mirrored", hostile=0, islands=0, companions_every=0, has_buffer=False, sickness=None
    )
    kind = r.choice(("mirrors", "standbys", "both"))
    mirrors, standbys = kind != "standbys", kind != "mirrors"
    faults = tuple(kind for kind in drawn.faults if kind != "not finite")
    faults += ("crash mirror", "freeze mirror") * mirrors + ("promote",) * 3 * standbys
    return replace(
        drawn, mirrors=mirrors, standbys=standbys, faults=faults, budget=0, outer=SUM, merge="mean",
        fragments=max(3, min(drawn.fragments, 6)), disks=(True,) * drawn.shards if standbys else drawn.disks,
        save_s=drawn.save_s or 0.005, faults_s=drawn.faults_s + 4.0,
    )  # fmt: skip


def draw_sick(seed: int) -> Options:
    """Schedules with a sick member."""
    return with_sick(replace(draw_short(seed), family="sick"))


FAMILIES: dict[str, Callable[[int], Options]] = {
    "short": draw_short,
    "long": draw_options,
    "memory": draw_memory,
    "islands": draw_islands,
    "companions": draw_companions,
    "mirrored": draw_mirrored,
    "sick": draw_sick,
}


def draw(name: str) -> Options:
    """The options for a name FAMILY:SEED. Raises ValueError."""
    family, _, seed = name.partition(":")
    if family not in FAMILIES or not seed.isdecimal():
        raise ValueError(f"{name!r} names no schedule; say {' or '.join(f'{f}:SEED' for f in sorted(FAMILIES))}")
    return FAMILIES[family](int(seed))
