"""Histories as a model: the processes of a run, what learners contributed, and where it was merged.

Lines come from files or from memory; `diloco_common/observe/history.py` describes them. All but `read_history` and
`read_histories` are pure functions of them.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Process:
    """The lines of one process from start to end. Each process of a shard is one epoch."""

    name: str
    number: int
    """Its number among the processes of this name, from 0."""
    lines: tuple[Line, ...]
    """At least one: "born"."""

    @property
    def began(self) -> float:
        return float(self.lines[0]["t"])

    @property
    def epoch(self) -> int:
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
    """Its base version. If the first contribution to a round is refused, a learner that takes no step in between may
    contribute the same tokens again."""
    since: int
    tokens: int

    @property
    def end(self) -> int:
        return self.since + self.tokens


PushName = tuple[str, int, int, int, int, int, int]
"""Learner, epoch of the shard, generation, fragment, round, base, tokens. Both sides record these for a push."""


@dataclass(frozen=True, eq=False)
class Histories:
    """Everything that was recorded: name -> the successive processes of that name."""

    shards: Mapping[str, Sequence[Process]]
    learners: Mapping[str, Sequence[Process]]

    def shard_processes(self) -> Iterator[Process]:
        return (process for processes in self.shards.values() for process in processes)

    def learner_processes(self) -> Iterator[Process]:
        return (process for processes in self.learners.values() for process in processes)

    @property
    def num_fragments(self) -> int:
        return len(self.owners)

    @cached_property
    def owners(self) -> dict[int, str]:
        return {
            line["fragment"]: process.name
            for process in self.shard_processes()
            for line in process.of("announced", "restored")
            if line["fragment"] not in self.companions
        }

    @cached_property
    def companions(self) -> frozenset[int]:
        """Fragments that hold something other than parameters. Counts per model leave them out."""
        return frozenset(
            line["fragment"]
            for process in self.shard_processes()
            for line in process.of("announced", "restored")
            if line.get("companion")
        )

    @cached_property
    def pushes(self) -> dict[PushName, Push]:
        """All pushes by learners. A contribution sent under two generations has two names."""
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
        return Lineage(self.shards, self.pushes)

    def merges(self) -> list[Merge]:
        """Contributions that are in the final model, each in the version that merged it."""
        return [merge for version in self.lineage.versions if version.survives for merge in version.merges]


class MemoryHistory:
    """The history of one process, in memory. Pass `lines` to `gather`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds. Histories that are judged together need the same clock."""
        self.lines: list[Line] = []
        self._clock = clock

    def write(self, what: str, **facts: Any) -> None:
        """Append one line."""
        self.lines.append({"t": self._clock(), "what": what, **facts})


def gather(histories: Iterable[tuple[str, Sequence[Line]]]) -> Histories:
    """Histories from pairs of a name and lines, in the order in which the processes started.

    The lines of a pair may come from one process, or from several in succession.
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


def read_history(path: Path) -> list[Line]:
    """The lines of a file, in order, without lines that a crash truncated. Raises OSError."""
    found: list[Line] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "t" in entry and "what" in entry:
            found.append(entry)
    return found


def read_histories(folder: Path) -> Histories:
    """All histories in a folder. Raises OSError."""
    return gather((path.stem, read_history(path)) for path in sorted(folder.glob("*.jsonl")))


def _split(lines: Sequence[Line]) -> Iterator[tuple[Line, ...]]:
    """Cut the lines at each birth of a process."""
    births = [i for i, line in enumerate(lines) if line["what"] == "born"]
    for begin, end in pairwise([*births, len(lines)]):
        yield tuple(lines[begin:end])


def _pushes(process: Process) -> Iterator[tuple[Line, Push]]:
    """A contribution may be sent again. After it is carried, the same work is sent as a new contribution."""
    last: dict[int, Push] = {}
    for line in process.lines:
        if line["what"] == "carried":
            last.pop(line["fragment"], None)
        if line["what"] != "pushed":
            continue
        push = last.get(line["fragment"])
        facts = tuple(line[fact] for fact in ("fragment", "shard_epoch", "round", "base", "since", "tokens"))
        if push is None or (push.fragment, push.shard_epoch, push.round, push.base, push.since, push.tokens) != facts:
            last[line["fragment"]] = push = Push(process, *facts)
        yield line, push


Name = tuple[int, int, int]
"""Fragment, epoch, version."""


@dataclass(frozen=True, eq=False)
class Merge:
    shard: str
    fragment: int
    version: int
    learner: str
    tokens: int
    counted: int
    """Number of these tokens that the shard counts."""
    into: Version
    push: Push | None
    """The push of its learner; None: no learner sent it."""
    previous: Merge | None
    """The contribution of the same process that was merged before this one, if any."""


@dataclass(eq=False)
class Version:
    """One durable version of one fragment."""

    fragment: int
    epoch: int
    """The epoch in which it was made. A later epoch may have renamed it."""
    version: int
    base: Version | None
    """The version from which it was made. None: it was seeded."""
    line: Line
    """The first line that says it was durable: "announced" or "restored"."""
    merges: list[Merge] = field(default_factory=list)
    left_out: list[Push] = field(default_factory=list)
    """Contributions that its round held and its shard left out. Their learners go on as if they were merged."""
    lost_in: int | None = None
    """The epoch in which its shard went on without it."""
    _branch: _Branch = field(init=False, repr=False)
    _place: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.base is not None and self.base._place == self.base._branch.length - 1:
            self._branch = self.base._branch
        else:
            self._branch = _Branch(self.base)
        self._place = self._branch.length
        self._branch.length += 1

    @property
    def survives(self) -> bool:
        """Whether the latest version of the fragment comes from it."""
        return self.lost_in is None

    def comes_from(self, other: Version) -> bool:
        """Whether this version holds everything in the other one. A version comes from itself."""
        return any(v._branch is other._branch and v._place >= other._place for v in self._forks())

    def last_of(self, process: Process) -> Merge | None:
        """The latest contribution of a process in this version."""
        for version in self._forks():
            places, merges = version._branch.merges.get(process, ((), ()))
            if (count := bisect_right(places, version._place)) > 0:
                return merges[count - 1]
        return None

    def _hold(self, merge: Merge) -> None:
        self.merges.append(merge)
        if merge.push is not None:
            places, merges = self._branch.merges.setdefault(merge.push.process, ([], []))
            places.append(self._place)
            merges.append(merge)

    def _forks(self) -> Iterator[Version]:
        """This version, then its nearest ancestor in each earlier branch."""
        version: Version | None = self
        while version is not None:
            yield version
            version = version._branch.begins_at


@dataclass(eq=False)
class _Branch:
    """Versions that followed each other without a fork."""

    begins_at: Version | None
    """The version of another branch from which the first one was made."""
    length: int = 0
    merges: dict[Process, tuple[list[int], list[Merge]]] = field(default_factory=dict)
    """Process -> the places of the versions that merged its contributions, ascending, and the merges."""


class Lineage:
    """All versions of all fragments."""

    def __init__(self, shards: Mapping[str, Sequence[Process]], pushes: Mapping[PushName, Push]) -> None:
        self.versions: list[Version] = []
        """Per shard, in the order in which they became durable."""
        self._pushes = pushes
        self._at: dict[int, Version] = {}  # id of a line -> its version
        self._names: dict[Name, Version] = {}
        self._merges: dict[Push, list[Merge]] = {}
        for name, processes in shards.items():
            self._follow(name, processes)

    def version(self, fragment: int, epoch: int, version: int) -> Version | None:
        """A version by any of its names. None: no shard announced it."""
        return self._names.get((fragment, epoch, version))

    def at(self, line: Line) -> Version:
        """The version of a line "announced" or "restored"."""
        return self._at[id(line)]

    def merges_of(self, push: Push) -> Sequence[Merge]:
        """The merges of a contribution. More than one is an error, unless all but one were lost."""
        return self._merges.get(push, ())

    def _follow(self, shard: str, processes: Sequence[Process]) -> None:
        closed: dict[Name, tuple[Line, Version | None]] = {}  # version being made -> its line "merging", and its base
        had: dict[int, Version] = {}  # fragment -> the latest version, in this epoch or an earlier one
        for process in processes:
            latest, own_epoch = dict[int, Version](), process.epoch
            for line in process.lines:
                what = line["what"]
                if what == "merging":
                    fragment = line["fragment"]
                    closed[fragment, own_epoch, line["version"]] = line, latest.get(fragment)
                elif what == "announced":
                    self._at[id(line)] = version = self._make(shard, line, line["epoch"], closed)
                    self._go_on(version, own_epoch, latest, had)
                elif what == "restored":
                    fragment, number = line["fragment"], line["version"]
                    stored = self._names.get((fragment, line["stored_epoch"], number))
                    version = stored or self._make(shard, line, line["stored_epoch"], closed)
                    for epoch in (line["epoch"], own_epoch):  # the shard may rename it to its own epoch later
                        self._names.setdefault((fragment, epoch, number), version)
                    self._at[id(line)] = version
                    self._go_on(version, own_epoch, latest, had)

    def _go_on(self, version: Version, epoch: int, latest: dict[int, Version], had: dict[int, Version]) -> None:
        """The shard has this version now. Mark the versions that it does not come from as lost: the shard came back
        with an older version, or a learner's values took their place."""
        fragment = version.fragment
        lost = had.get(fragment)
        while lost is not None and lost.survives and not version.comes_from(lost):
            lost.lost_in = epoch
            lost = lost.base
        latest[fragment] = had[fragment] = version

    def _make(self, shard: str, line: Line, epoch: int, closed: Mapping[Name, tuple[Line, Version | None]]) -> Version:
        """Add a version that a line says is durable."""
        name = line["fragment"], epoch, line["version"]
        merging, base = closed.get(name, (None, None))
        version = Version(*name, base, line)
        self.versions.append(version)
        self._names[name] = version
        merging = merging if merging is not None else {"contributions": ()}
        for c in merging.get("left_out", ()):
            push = self._push(name, c)
            if push is not None:
                version.left_out.append(push)
        for c in merging["contributions"]:
            push = self._push(name, c)
            merge = Merge(
                shard, name[0], name[2], c["learner"], c["tokens"], c.get("counted", c["tokens"]), version, push,
                version.last_of(push.process) if push is not None else None,
            )  # fmt: skip
            version._hold(merge)
            if push is not None:
                self._merges.setdefault(push, []).append(merge)
        return version

    def _push(self, name: Name, c: Line) -> Push | None:
        """The push of a contribution to this version."""
        fragment, epoch, number = name
        return self._pushes.get((c["learner"], epoch, c["generation"], fragment, number, c["base"], c["tokens"]))
