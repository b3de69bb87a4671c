"""What really happened, seen from above: which tokens every contribution holds, and which versions hold it.

A learner trains tokens one after the other, so what it trained on a fragment is a range [start, end) of its own
count. An `Origin` ties the bytes of a contribution to that range, whoever repeats, delays or drops them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from diloco_common.codec import Payload
from diloco_simulator.arithmetic import Arithmetic, Value


@dataclass
class Origin:
    """One contribution, and what became of it."""

    learner_id: str
    instance: str
    """The process that trained it."""
    fragment_id: int
    round: int
    epoch: int
    start: int
    """Tokens that the process had trained before those in here."""
    end: int
    meant: Value
    """What was to be encoded."""
    payload: Payload | None = None
    merged: bool = False
    """In the version `round` of `epoch`."""
    belief: str = ""
    """What its learner thinks: "" (not known yet), "merged" or "carried"."""


@dataclass(frozen=True)
class Published:
    """A version as its shard serves it."""

    payload: Payload
    values: Value
    """Decoded."""


class Truth:
    """The omniscient record of one cluster."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.live_epochs: dict[int, int] = {}
        """Shard -> the epoch of the process that runs."""
        self.published: dict[tuple[int, int], dict[int, Published]] = defaultdict(dict)
        """(epoch, fragment) -> version -> what is served."""
        self.announced: dict[tuple[int, int], int] = {}
        """(epoch, fragment) -> latest version that anybody was told of."""
        self.merged: dict[tuple[str, int, int], list[Origin]] = defaultdict(list)
        """(instance, fragment, epoch) -> its contributions in versions, in the order of the versions."""
        self.entries: dict[tuple[str, int, int], int] = {}
        """(instance, fragment, epoch) -> tokens that the process counted as merged when it took over the epoch."""
        self.residuals: dict[tuple[str, int], Value] = {}
        """(instance, fragment) -> what encoders lost of contributions that the learner counts as merged."""
        self.counts: Counter[str] = Counter()
        self._origins: dict[int, Origin] = {}

    def encoded(self, origin: Origin, payload: Payload) -> None:
        """The contribution travels as this payload object from now on."""
        origin.payload = payload  # also keeps the id below from being used again
        self._origins[id(payload)] = origin

    def origin(self, payload: Payload) -> Origin:
        return self._origins[id(payload)]

    def publish(self, epoch: int, fragment_id: int, version: int, payload: Payload) -> None:
        self.published[epoch, fragment_id][version] = Published(payload, self.arithmetic.decoded(payload))

    def is_live(self, epoch: int) -> bool:
        return epoch in self.live_epochs.values()
