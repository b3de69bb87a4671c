"""Histories as a model: the processes of a run, what learners contributed, and where it was merged.

Lines come from files or from memory (`history.py`). Everything here is a pure function of them. `lineage.py` says which
version was made from which. The lines, in the order in which each process writes them:

    shard     born      role="shard", epoch
              joined    learner, generation
              gone      learner, generation, code
              opened    fragment, round, asked
              accepted  learner, generation, fragment, round, epoch, base, tokens, steps
              declined  the same, outcome, code
              merging   fragment, version, contributions: [learner, generation, round, base, tokens, steps, counted]
              announced fragment, epoch, version, checksum, state, tokens_merged; companion, of those alone
              restored  the same, stored_epoch
    learner   born      role="learner", step, tokens
              stepped   step, tokens
              pushed    shard_epoch, generation, fragment, round, epoch, base, tokens, steps, since
              answered  fragment, round, outcome, code
              carried   shard_epoch, fragment, round, tokens
              applied   fragment, epoch, version, checksum, merged, forgotten, since
              ended

Every line has `t`, in seconds. The `epoch` and `base` of a contribution name its base version. `counted` is how many of
its tokens count as merged, where that is not all. A shard writes `merging` before it computes a version. It writes
`announced` once the version is durable, before any learner hears of it. A later epoch of the shard writes `restored`
for the version with which it begins; `stored_epoch` is the epoch in the name on the disk. `state` is a checksum of
everything that the shard goes on from, `checksum` one of the values that learners get. The leader of an island writes
for all its ranks. It does not hold all values, so its `applied` have no checksum.

`since` is a learner's own count of tokens. As far as the learner knows, all work before it is merged. From `applied` on
the learner counts its contribution to round `merged` as merged, because the version holds it; or its contribution to
round `forgotten`, because the shard no longer knows. From `carried` on it counts the contribution as not merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from diloco_common.observe.lineage import Lineage, Merge

Line = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Process:
    """The lines of one process, from its start to its end. Each process of a shard is one epoch."""

    name: str
    """Name of the learner or of the shard."""
    number: int
    """Its number among the processes of this name, counted from 0."""
    lines: tuple[Line, ...]
    """At least one: "born"."""

    @property
    def began(self) -> float:
        return float(self.lines[0]["t"])

    @property
    def epoch(self) -> int:
        """The epoch of this process. Shards only."""
        return int(self.lines[0]["epoch"])

    def of(self, *what: str) -> Iterator[Line]:
        """Its lines of these kinds, in order."""
        return (line for line in self.lines if line["what"] in what)


@dataclass(frozen=True, eq=False)
class Push:
    """A contribution as its learner sent it: the tokens [since, end) of one process."""

    process: Process
    fragment: int
    shard_epoch: int
    """Epoch of the shard that asked for it."""
    round: int
    base: int
    """Its base version. A learner that takes no step between may contribute the same tokens twice to a round, of which
    the first was refused."""
    since: int
    tokens: int

    @property
    def end(self) -> int:
        return self.since + self.tokens


PushName = tuple[str, int, int, int, int, int, int]
"""Learner, epoch of the shard, generation, fragment, round, base, tokens. Both sides record these of a push."""


@dataclass(frozen=True, eq=False)
class Histories:
    """Everything that was recorded: name -> the processes of that name, one after the other."""

    shards: Mapping[str, Sequence[Process]]
    learners: Mapping[str, Sequence[Process]]

    def shard_processes(self) -> Iterator[Process]:
        return (process for processes in self.shards.values() for process in processes)

    def learner_processes(self) -> Iterator[Process]:
        return (process for processes in self.learners.values() for process in processes)

    @property
    def num_fragments(self) -> int:
        """Of the model."""
        return len(self.owners)

    @cached_property
    def owners(self) -> dict[int, str]:
        """Fragment of the model -> name of its shard."""
        return {
            line["fragment"]: process.name
            for process in self.shard_processes()
            for line in process.of("announced", "restored")
            if line["fragment"] not in self.companions
        }

    @cached_property
    def companions(self) -> frozenset[int]:
        """The fragments that are not of the model: what is counted by the model leaves them out."""
        return frozenset(
            line["fragment"]
            for process in self.shard_processes()
            for line in process.of("announced", "restored")
            if line.get("companion")
        )

    @cached_property
    def pushes(self) -> dict[PushName, Push]:
        """All pushes of learners. A contribution sent under two generations has two names."""
        found: dict[PushName, Push] = {}
        for process in self.learner_processes():
            for line, push in self.pushes_of[process]:
                place = line["generation"], push.fragment, push.round, line["base"], push.tokens
                found[process.name, push.shard_epoch, *place] = push
        return found

    @cached_property
    def pushes_of(self) -> dict[Process, list[tuple[Line, Push]]]:
        """Process of a learner -> its lines "pushed", each with its contribution."""
        return {process: list(_pushes(process)) for process in self.learner_processes()}

    @cached_property
    def lineage(self) -> Lineage:
        """All versions, and whose contributions each one holds."""
        return Lineage(self.shards, self.pushes)

    def merges(self) -> list[Merge]:
        """Contributions that are in the final model, each in the version that merged it."""
        return [merge for version in self.lineage.versions if version.survives for merge in version.merges]


def gather(histories: Iterable[tuple[str, Sequence[Line]]]) -> Histories:
    """Histories from pairs of a name and lines, in the order in which the processes were started.

    The lines of a pair may come from one process, or from several that followed each other.
    """
    lines_of: dict[str, list[tuple[Line, ...]]] = {}
    for name, lines in histories:
        lines_of.setdefault(name, []).extend(_split(lines))
    shards: dict[str, Sequence[Process]] = {}
    learners: dict[str, Sequence[Process]] = {}
    for name, parts in lines_of.items():
        if parts:
            processes = [Process(name, number, part) for number, part in enumerate(parts)]
            (shards if parts[0][0]["role"] == "shard" else learners)[name] = processes
    return Histories(shards, learners)


def _split(lines: Sequence[Line]) -> Iterator[tuple[Line, ...]]:
    """Cut the lines at each birth of a process."""
    births = [i for i, line in enumerate(lines) if line["what"] == "born"]
    for begin, end in pairwise([*births, len(lines)]):
        yield tuple(lines[begin:end])


def _pushes(process: Process) -> Iterator[tuple[Line, Push]]:
    last: dict[int, Push] = {}
    for line in process.of("pushed"):
        push = last.get(line["fragment"])
        facts = tuple(line[fact] for fact in ("fragment", "shard_epoch", "round", "base", "since", "tokens"))
        if push is None or (push.fragment, push.shard_epoch, push.round, push.base, push.since, push.tokens) != facts:
            last[line["fragment"]] = push = Push(process, *facts)
        yield line, push
