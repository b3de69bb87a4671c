"""Histories drawn from a seed: a small shard that loses and renames versions, and learners that come and go.

`Flaw` says which promise is broken, if any. What happens here is no model of the product: only its lines are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

from diloco_common.observe.histories import Histories, gather
from diloco_common.observe.history import MemoryHistory


class Flaw(Enum):
    """What goes wrong. Value: the check that is to find it."""

    CARRIES_WHAT_IS_MERGED = "double_counted"
    COUNTS_WHAT_IS_NOT_MERGED = "work_lost"
    LOSES_A_VERSION = "lost_versions"
    BRINGS_OTHER_BYTES_BACK = "differing_bytes"
    MERGES_THE_EVICTED = "fencing"
    DROPS_WHAT_IT_ACCEPTED = "accounting"


@dataclass(eq=False)
class Version:
    name: tuple[int, int]
    """Epoch and version, as on the disk."""
    tokens: int
    merged: frozenset[Contribution]


@dataclass(eq=False)
class Contribution:
    learner: Learner
    round: int
    epoch: int
    tokens: int


@dataclass(eq=False)
class Learner:
    name: str
    history: MemoryHistory
    tokens: int = 0
    since: int = 0
    holds: tuple[int, int] | None = None
    lease: tuple[int, int] = (0, 0)
    pending: Contribution | None = None


@dataclass
class Run:
    """One fragment, from its seed on."""

    seed: int
    flaw: Flaw | None = None
    learners: int = 3
    happened: int = 0
    """How often the flaw had its way."""
    excused: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random, self.now, self.epoch, self.generations = random.Random(self.seed), 0.0, 0, 0
        self.histories: list[tuple[str, MemoryHistory]] = []
        self.disk: list[Version] = []
        self.accepted: dict[Contribution, int] = {}  # -> generation
        self.members: dict[str, int] = {}
        self.everyone = [self.learner(f"w{i}", 0) for i in range(self.learners)]
        self.start_shard()

    def go(self, actions: int) -> Histories:
        """Let so many things happen."""
        often = [self.step, self.push, self.push, self.apply, self.apply, self.close]
        seldom = [self.leave_round, self.evict, self.crash_learner, self.crash_shard]
        for _ in range(actions):
            self.random.choice(often if self.random.random() < 0.95 else seldom)()
        return gather((name, history.lines) for name, history in self.histories)

    # ------------------------------------------------------------ learners

    def learner(self, name: str, tokens: int) -> Learner:
        learner = Learner(name, self.history(name), tokens, tokens)
        learner.history.write("born", role="learner", step=tokens, tokens=tokens)
        return learner

    def step(self) -> None:
        learner = self.random.choice(self.everyone)
        learner.tokens += self.random.randint(1, 4)
        learner.history.write("stepped", step=learner.tokens, tokens=learner.tokens)

    def push(self) -> None:
        """Contribute, if the learner has something and holds the latest version."""
        learner = self.random.choice(self.everyone)
        self.join(learner)
        latest, pending = self.disk[-1], learner.pending
        if pending is None:
            if learner.holds != self.name or learner.tokens == learner.since:
                return
            pending = Contribution(learner, latest.name[1] + 1, self.epoch, learner.tokens - learner.since)
            learner.pending = pending
        if pending.round != latest.name[1] + 1 or pending.epoch != self.epoch:
            return
        facts = {
            "generation": learner.lease[1], "fragment": 0, "round": pending.round, "epoch": self.name[0],
            "base": self.name[1], "tokens": pending.tokens, "steps": 1,
        }  # fmt: skip
        learner.history.write("pushed", shard_epoch=self.epoch, since=learner.since, **facts)
        if pending not in self.accepted and self.random.random() < 0.8:
            self.accepted[pending] = learner.lease[1]
            self.shard.write("accepted", learner=learner.name, **facts)

    def join(self, learner: Learner) -> None:
        if learner.lease == (self.epoch, self.members.get(learner.name)):
            return
        self.end(learner.name, "STALE_GENERATION")
        self.generations += 1
        learner.lease, self.members[learner.name] = (self.epoch, self.generations), self.generations
        self.shard.write("joined", learner=learner.name, generation=self.generations)
        pending = learner.pending
        if pending is not None and pending.epoch != self.epoch and pending not in self.disk[-1].merged:
            self.carry(learner)

    def apply(self) -> None:
        learner, latest = self.random.choice(self.everyone), self.disk[-1]
        self.join(learner)
        if learner.holds == self.name:
            return
        pending, merged = learner.pending, None
        if pending is not None:
            is_in = pending in latest.merged
            if is_in and self.broken(Flaw.CARRIES_WHAT_IS_MERGED):
                is_in = False
            elif not is_in and pending.round <= latest.name[1] and self.broken(Flaw.COUNTS_WHAT_IS_NOT_MERGED):
                is_in = True
            if is_in:
                merged, learner.since, learner.pending = pending.round, learner.since + pending.tokens, None
            elif pending.round <= latest.name[1]:
                self.carry(learner)
        learner.holds = self.name
        learner.history.write(
            "applied", fragment=0, epoch=self.name[0], version=self.name[1], checksum=self.bytes_of(latest),
            merged=merged, forgotten=None, since=learner.since,
        )  # fmt: skip

    def carry(self, learner: Learner) -> None:
        pending, learner.pending = learner.pending, None
        assert pending is not None
        learner.history.write(
            "carried", shard_epoch=pending.epoch, fragment=0, round=pending.round, tokens=pending.tokens
        )

    def crash_learner(self) -> None:
        """It goes on from a checkpoint of any age."""
        learner = self.random.choice(self.everyone)
        again = self.learner(learner.name, self.random.randint(0, learner.tokens))
        self.everyone[self.everyone.index(learner)] = again

    # ------------------------------------------------------------ the shard

    def start_shard(self) -> None:
        self.epoch += 1
        self.members, self.accepted = {}, {}
        self.shard = self.history("shard-0")
        self.shard.write("born", role="shard", epoch=self.epoch)
        if self.disk:
            stored = self.disk[-1]
            is_new_name = (self.epoch, 0) in self.excused or self.random.random() < 0.2
            self.name = (self.epoch if is_new_name else stored.name[0], stored.name[1])
            self.tell("restored", stored, stored_epoch=stored.name[0])
        else:
            self.disk.append(Version((self.epoch, 0), 0, frozenset()))
            self.name = self.disk[-1].name
            self.tell("announced", self.disk[-1])

    def crash_shard(self) -> None:
        """Its disk may lose what was written last, or everything."""
        if self.random.random() < 0.4:
            self.excused.add((self.epoch + 1, 0))
            del self.disk[-self.random.randint(1, 3) :]
        elif len(self.disk) > 1 and self.broken(Flaw.LOSES_A_VERSION):
            del self.disk[-1]
        self.start_shard()

    def close(self) -> None:
        """A version may be made and not announced, or not be made, when the shard is killed."""
        if not self.accepted:
            return
        latest, kept = self.disk[-1], dict(self.accepted)
        if len(kept) > 1 and self.broken(Flaw.DROPS_WHAT_IT_ACCEPTED):
            del kept[next(iter(kept))]
        version = Version(
            (self.epoch, latest.name[1] + 1), latest.tokens + sum(c.tokens for c in kept), latest.merged | set(kept)
        )
        contributions = [
            {
                "learner": c.learner.name, "generation": generation, "round": c.round, "base": latest.name[1],
                "tokens": c.tokens, "steps": 1,
            }
            for c, generation in kept.items()
        ]  # fmt: skip
        self.shard.write("merging", fragment=0, version=version.name[1], contributions=contributions)
        chance = self.random.random()
        if chance < 0.02:
            self.start_shard()
            return
        self.disk.append(version)
        if chance < 0.04:
            self.start_shard()
            return
        self.name, self.accepted = version.name, {}
        self.tell("announced", version)

    def evict(self) -> None:
        for name in list(self.members)[:1]:
            self.end(name, "LEASE_EXPIRED")

    def leave_round(self) -> None:
        for name in list(self.members)[:1]:
            self.shard.write("gone", learner=name, generation=self.members.pop(name), code="LEFT")

    def end(self, name: str, code: str) -> None:
        """A generation is over, and what it has in the open round with it."""
        generation = self.members.pop(name, None)
        if generation is None:
            return
        self.shard.write("gone", learner=name, generation=generation, code=code)
        held = [c for c, g in self.accepted.items() if g == generation]
        if not held or not self.broken(Flaw.MERGES_THE_EVICTED):
            self.accepted = {c: g for c, g in self.accepted.items() if g != generation}

    def tell(self, what: str, version: Version, **facts: int) -> None:
        other = what == "restored" and self.broken(Flaw.BRINGS_OTHER_BYTES_BACK)
        checksum = "other" if other else self.bytes_of(version)
        self.shard.write(
            what, fragment=0, epoch=self.name[0], version=self.name[1], checksum=checksum, state=checksum,
            tokens_merged=version.tokens, **facts,
        )  # fmt: skip

    # ------------------------------------------------------------ helpers

    def history(self, name: str) -> MemoryHistory:
        self.histories.append((name, MemoryHistory(self.clock)))
        return self.histories[-1][1]

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def bytes_of(self, version: Version) -> str:
        return f"{version.name[0]}-{version.name[1]}"

    def broken(self, flaw: Flaw) -> bool:
        """Whether this flaw has its way now."""
        if self.flaw is not flaw or self.random.random() < 0.5:
            return False
        self.happened += 1
        return True
