"""The shards that a learner has joined, and which of them have stopped.

What they say has been looked at before (agreement.py).
"""

from __future__ import annotations

from collections.abc import Collection

from diloco_worker.core.events import Joined


class Shards:
    """One for each address that the learner was given, once it has joined."""

    def __init__(self, num_addresses: int) -> None:
        self._num_addresses = num_addresses
        self._joined: dict[int, Joined] = {}  # by index
        self._stopped: set[int] = set()

    @property
    def joined(self) -> Collection[Joined]:
        """As each of them joined last."""
        return self._joined.values()

    @property
    def are_complete(self) -> bool:
        return len(self._joined) == self._num_addresses

    @property
    def have_stopped(self) -> bool:
        """All of them have reached the token budget."""
        return len(self._stopped) == self._num_addresses

    def has_stopped(self, shard_index: int) -> bool:
        """It has reached the token budget."""
        return shard_index in self._stopped

    def join(self, joined: Joined) -> bool:
        """A shard gave a lease; says whether it is new."""
        is_new = joined.shard_index not in self._joined
        self._joined[joined.shard_index] = joined
        self._stopped.discard(joined.shard_index)
        return is_new

    def stop(self, shard_index: int) -> None:
        """It has reached the token budget; in another epoch it may not have."""
        self._stopped.add(shard_index)
