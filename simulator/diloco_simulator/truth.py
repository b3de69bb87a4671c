"""What really happened, seen from above: which tokens every contribution holds, and which versions hold it.

A learner trains tokens one after the other, so what it trained on a fragment is a range [start, end) of its own
count. An `Origin` ties the bytes of a contribution to that range, whoever repeats, delays or drops them. A `Version`
knows the one that it was made from, so what it holds is known whatever shards forget: versions that were lost are on a
branch that no later one comes from.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from diloco_common.codec import Payload
from diloco_simulator.arithmetic import Arithmetic, Value

Name = tuple[int, int]
"""Of a version of a fragment: the epoch that it was made in, and its number."""


@dataclass(eq=False)
class Origin:
    """One contribution, and what became of it."""

    learner_id: str
    process_id: str
    """The process that trained it."""
    fragment_id: int
    round: int
    epoch: int
    """Of the life of the shard that asked for it."""
    start: int
    """Tokens that the process had trained before those in here."""
    end: int
    meant: Value
    """What was to be encoded."""
    payload: Payload | None = None
    merged: bool = False
    """In some version, perhaps one that was lost."""
    belief: str = ""
    """What its learner thinks: "" (not known yet), "merged", "carried", or "forgotten": its shard no longer knows."""


@dataclass(eq=False)
class Version:
    """A version of a fragment, from the moment that it is computed."""

    fragment_id: int
    name: Name
    payload: Payload
    """As its shard serves it."""
    values: Value
    """What is served, decoded. A version that got another name shares this object."""
    theta: Value
    """A copy of what the shard goes on from."""
    before: Version | None
    """What it was made from; None: it was seeded."""
    merged: dict[str, tuple[Origin, ...]]
    """Process -> its contributions that are in here, in the order of the versions."""

    def descends_from(self, other: Version) -> bool:
        """Whether everything of the other version is in this one; a version descends from itself."""
        number = other.name[1]
        version: Version | None = self
        while version is not None and version.name[1] > number:
            version = version.before
        return version is not None and version.values is other.values


class Truth:
    """The omniscient record of one cluster."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.versions: dict[tuple[int, Name], Version] = {}
        """Of (fragment, name)."""
        self.heads: dict[int, Version] = {}
        """Fragment -> the version that its shard goes on from: computed, perhaps not announced yet."""
        self.announced: dict[int, Version] = {}
        """Fragment -> latest version that anybody was told of."""
        self.entries: dict[tuple[str, int], tuple[int, int]] = {}
        """(process_id, fragment) -> when it came over to the line of versions that it is in: its contributions that were
        in the version then, and the tokens that it counted as merged."""
        self.residuals: dict[tuple[str, int], Value] = {}
        """(process_id, fragment) -> what encoders lost of contributions that the learner counts as merged."""
        self.counts: Counter[str] = Counter()
        self.fragments_of: defaultdict[int, set[int]] = defaultdict(set)
        """Shard -> fragments that it ever had a version of."""
        self._origins: dict[int, Origin] = {}

    def encoded(self, origin: Origin, payload: Payload) -> None:
        """The contribution travels as this payload object from now on."""
        origin.payload = payload  # also keeps the id below from being used again
        self._origins[id(payload)] = origin

    def origin(self, payload: Payload) -> Origin:
        return self._origins[id(payload)]

    def publish(
        self, fragment_id: int, name: Name, payload: Payload, theta: Any, before: Version | None, origins: list[Origin]
    ) -> None:
        """A version is computed; `theta` is copied."""
        merged = dict(before.merged) if before is not None else {}
        for origin in origins:
            origin.merged = True
            merged[origin.process_id] = (*merged.get(origin.process_id, ()), origin)
        values = self.arithmetic.decoded(payload)
        version = Version(fragment_id, name, payload, values, theta.clone(), before, merged)
        self.versions[fragment_id, name] = self.heads[fragment_id] = version

    def rename(self, old: Version, name: Name) -> Version:
        """A version goes under another name from now on."""
        p = old.fragment_id
        new = Version(p, name, old.payload, old.values, old.theta, old.before, old.merged)
        self.versions[p, name] = new
        if self.heads.get(p) is old:
            self.heads[p] = new
        return new
