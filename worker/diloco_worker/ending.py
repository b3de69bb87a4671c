"""How long a learner that ends waits, and for whom."""

from __future__ import annotations

from collections.abc import Mapping

from diloco_worker.boundary import StepBoundary
from diloco_worker.connections import Connections
from diloco_worker.council import Council


class Ending:
    """What is still missing at an end. Owned by the training thread."""

    usual_s: float
    """At most, where nobody says for how long to wait."""

    def __init__(self, boundary: StepBoundary, connections: Connections, council: Council) -> None:
        self._boundary = boundary
        self._connections = connections
        self._council = council

    def look(self, waited_s: float, wait_s: float | None) -> tuple[bool, str]:
        """Whether to wait no longer, and what is missing, in words; empty: nothing.

        At most `wait_s` seconds; None: `usual_s`, and not for shards that are gone.
        """
        missing = self.missing()
        gone = {c.address for c in self._connections if c.is_gone} if wait_s is None else set()
        is_late = waited_s >= (self.usual_s if wait_s is None else wait_s)
        is_over = not self.is_busy and (is_late or not (missing.keys() - gone or self.is_settling(waited_s)))
        said = self._council.agree(f"{is_over:d}{'; '.join(missing.values())}")
        return said[0] == "1", said[1:]

    def missing(self) -> Mapping[str, str]:
        """Address of a shard -> what has not come from it, or gone to it, in words."""
        raise NotImplementedError

    @property
    def is_busy(self) -> bool:
        """Whether this is no moment to end."""
        return False

    def is_settling(self, waited_s: float) -> bool:
        """Whether something is to be waited for although nothing is missing."""
        return False
