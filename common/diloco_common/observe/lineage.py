"""The versions of a run as trees: which one was made from which, and whose contributions each one holds.

A version without a base was seeded. Once a version has merged a contribution, all its descendants hold it too. If a
shard loses versions and goes on from an earlier one, the tree forks. Contributions that only the lost versions held are
no longer in the model.

A branch holds versions that followed each other without a fork. So a question takes one step per fork, and a binary
search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco_common.observe.histories import Line, Process, Push, PushName

Name = tuple[int, int, int]
"""Fragment, epoch, version."""


@dataclass(frozen=True, eq=False)
class Merge:
    """A contribution that a version holds."""

    at: float
    """When that version was announced, or when a later epoch restored it."""
    shard: str
    fragment: int
    version: int
    learner: str
    tokens: int
    counted: int
    """Of those, as the shard says."""
    into: Version
    push: Push | None
    """The push of its learner; None: no learner sent it."""
    previous: Merge | None
    """The contribution of the same process that was merged before this one, if any."""


@dataclass(eq=False)
class Version:
    """One version of one fragment that was durable."""

    fragment: int
    epoch: int
    """The epoch in which it was made. A later epoch may have given it another name."""
    version: int
    base: Version | None
    """The version it was made from; None: it was seeded."""
    line: Line
    """The first line that says it was durable: "announced" or "restored"."""
    merges: list[Merge] = field(default_factory=list)
    lost_in: int | None = None
    """The epoch in which its shard came back without it."""
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
    """Process -> the places of the versions that merged its contributions, ascending, and the contributions."""


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
        """Where a contribution was merged. More than one merge is a mistake, unless all but one were lost."""
        return self._merges.get(push, ())

    def _follow(self, shard: str, processes: Sequence[Process]) -> None:
        closed: dict[Name, tuple[Line, Version | None]] = {}  # version to make -> its line "merging", and its base
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
        """The shard has this version now. The first version of an epoch shows which ones were lost."""
        fragment = version.fragment
        lost = had.get(fragment) if fragment not in latest else None
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
        for c in merging["contributions"] if merging is not None else ():
            push = self._pushes.get((c["learner"], epoch, c["generation"], name[0], name[2], c["base"], c["tokens"]))
            merge = Merge(
                float(line["t"]), shard, name[0], name[2], c["learner"], c["tokens"],
                c.get("counted", c["tokens"]), version, push,
                version.last_of(push.process) if push is not None else None,
            )  # fmt: skip
            version._hold(merge)
            if push is not None:
                self._merges.setdefault(push, []).append(merge)
        return version
