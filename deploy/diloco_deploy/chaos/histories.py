"""What the processes of a cluster recorded, life by life, and what follows from all of it together.

The lines are described by their writers: diloco_server/history.py and diloco_worker/history.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from diloco_common.history import read_history

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Life:
    """One process from its start to its end."""

    name: str
    number: int
    """Counted from 0."""
    lines: tuple[Line, ...]

    @property
    def began(self) -> float:
        return float(self.lines[0]["t"])

    def of(self, *what: str) -> Iterator[Line]:
        """Its lines of these kinds, in order."""
        return (line for line in self.lines if line["what"] in what)


PushName = tuple[str, int, int, int, int]
"""Learner, epoch of the shard's life, generation, fragment, round: of one push, in the words of both sides."""


@dataclass(frozen=True)
class Push:
    """A contribution as its learner sent it."""

    life: Life
    """Of the learner."""
    since: int
    """The learner's own count of tokens where the work in it begins."""


@dataclass(frozen=True)
class Merge:
    """A contribution that an announced version holds."""

    at: float
    """When that version was announced, or was there again after a crash."""
    shard: str
    life: int
    """Epoch of the shard's life that merged it."""
    fragment: int
    version: int
    learner: str
    generation: int
    tokens: int

    @property
    def push(self) -> PushName:
        """The push that brought it."""
        return self.learner, self.life, self.generation, self.fragment, self.version


@dataclass(frozen=True)
class Histories:
    """Everything that was recorded: name of a process -> its lives."""

    shards: Mapping[str, Sequence[Life]]
    workers: Mapping[str, Sequence[Life]]

    def shard_lives(self) -> Iterator[Life]:
        return (life for lives in self.shards.values() for life in lives)

    def worker_lives(self) -> Iterator[Life]:
        return (life for lives in self.workers.values() for life in lives)

    @property
    def num_fragments(self) -> int:
        return len(self.owners)

    @cached_property
    def owners(self) -> dict[int, str]:
        """Fragment -> its shard."""
        return {line["fragment"]: life.name for life in self.shard_lives() for line in life.of("announced", "restored")}

    def pushes(self) -> dict[PushName, Push]:
        """What learners sent."""
        return {
            (life.name, line["life"], line["generation"], line["fragment"], line["round"]): Push(life, line["since"])
            for life in self.worker_lives()
            for line in life.of("pushed")
        }

    def merges(self) -> list[Merge]:
        """Contributions that took effect: the version that they were merged into was announced, or a later life of
        the shard came back with it or a later one."""
        return [merge for lives in self.shards.values() for merge in _merges(lives)]


def read_histories(folder: Path) -> Histories:
    """The histories in a folder. Raises OSError."""
    shards: dict[str, Sequence[Life]] = {}
    workers: dict[str, Sequence[Life]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        lives = split_lives(path.stem, read_history(path))
        if lives:
            (shards if lives[0].lines[0]["role"] == "shard" else workers)[path.stem] = lives
    return Histories(shards, workers)


def split_lives(name: str, lines: Sequence[Line]) -> list[Life]:
    """Cut a history where a process was born."""
    births = [i for i, line in enumerate(lines) if line["what"] == "born"]
    ends = [*births[1:], len(lines)]
    return [
        Life(name, number, tuple(lines[a:b])) for number, (a, b) in enumerate(zip(births, ends, strict=True))
    ]  # fmt: skip


def _merges(lives: Sequence[Life]) -> Iterator[Merge]:
    for life in lives:
        announced = {(line["fragment"], line["version"]): line["t"] for line in life.of("announced")}
        restored: dict[int, Line] = {}
        for later in lives[life.number + 1 :]:
            for line in later.of("restored"):
                restored.setdefault(line["fragment"], line)
        for line in life.of("merging"):
            fragment, version = line["fragment"], line["version"]
            back = restored.get(fragment)
            if back is not None and version > back["version"]:
                continue  # lost: what it held was pushed again
            at = announced.get((fragment, version))
            if at is None and back is None:
                continue  # never finished
            for c in line["contributions"]:
                yield Merge(
                    at if at is not None else float(back["t"] if back else 0.0), life.name, life.lines[0]["life"],
                    fragment, version, c["learner"], c["generation"], c["tokens"],
                )  # fmt: skip
