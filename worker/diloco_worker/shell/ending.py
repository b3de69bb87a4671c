"""The end of a learner: what it waits for, how long, and what it logs meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from diloco_common.observe.logs import Log
from diloco_common.wire.calls import SAY_EVERY_S
from diloco_worker.shell.boundary import StepBoundary
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.council import Council

FINISH_S = 60.0
"""Seconds to wait for the last versions: at most one pull of each fragment."""
LEAVE_S = 25.0
"""Seconds to hand over the work since the last contributions. Clouds warn 30 seconds ahead, or more."""
FIRST_S = 1.5
"""Waits longer than this, in seconds, are logged."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a learner's work. True if the run has all of it, and the model has the last versions."""

    work: Literal["all", "partly", "none"]
    """How much of it versions hold. In a run that has reached its budget, work that was too late does not count: "all"
    then means that some was merged."""
    tokens: int
    tokens_unmerged: int
    """Those of them in no version, averaged over fragments, including work too late for the budget."""
    is_global: bool
    """Whether the model now holds the run's values; otherwise it holds the trained ones."""
    why: str
    """What is missing, as text; empty: nothing."""

    def __bool__(self) -> bool:
        return self.work == "all" and not self.why

    def __int__(self) -> int:
        """For scripts that count it: it used to be a bool."""
        return int(bool(self))


class Ending:
    """Finds what is still missing at the end. Owned by the training thread."""

    usual_s: float
    """Seconds to wait at most, by default."""
    waits: str
    """The log line of the wait."""

    def __init__(self, boundary: StepBoundary, connections: Connections, council: Council) -> None:
        self._boundary = boundary
        self._connections = connections
        self._council = council

    def look(self, waited_s: float, wait_s: float | None) -> tuple[bool, str]:
        """Whether to stop waiting, and what is missing, as text; empty: nothing.

        Waits at most `wait_s` seconds; None: `usual_s`, and not for shards that are gone.
        """
        missing = self.missing()
        gone = {c.address for c in self._connections if c.is_gone} if wait_s is None else set()
        is_late = waited_s >= (self.usual_s if wait_s is None else wait_s)
        is_over = not self.is_busy and (is_late or not missing.keys() - gone)
        said = self._council.agree(f"{is_over:d}{'; '.join(missing.values())}")
        return said[0] == "1", said[1:]

    def missing(self) -> Mapping[str, str]:
        """Address of a shard -> what has not come from it, or reached it, as text."""
        raise NotImplementedError

    @property
    def is_busy(self) -> bool:
        """Whether the learner cannot end at this moment."""
        return False

    def unmerged(self) -> dict[str, str]:
        """Work in no version that a shard could still merge; keys as in `missing`."""
        core, shards = self._boundary.core, self._boundary.shards
        if core is None:
            return {}  # nothing was trained
        found = Counter(f.fragment.shard_index for f in core.exported if f.tokens_since(core.tokens) > 0)
        address = {c.state.shard_index: c.address for c in self._connections}
        held = {address.get(i, f"shard {i}"): n for i, n in found.items() if not shards.has_stopped(i)}
        return {shard: f"work on {n} fragments of {shard}" for shard, n in held.items()}


class Finishing(Ending):
    """Ends with the last version of every fragment in the model, and nothing else.

    A shard that has reached the budget makes no more versions, so the one that it announced last is final. If training
    ends earlier, the learner hands over its work as when it leaves, and waits for the versions that were announced when
    `finish` was called: others continue, and would announce new ones forever.
    """

    usual_s = FINISH_S
    waits = "waiting for the last versions"

    def __init__(self, boundary: StepBoundary, connections: Connections, council: Council) -> None:
        super().__init__(boundary, connections, council)
        self._wanted: dict[int, tuple[int, int]] = {}  # fragment -> epoch and version, as first announced
        self._hands_over = True  # whether to wait for rounds

    def look(self, waited_s: float, wait_s: float | None) -> tuple[bool, str]:
        self._hands_over = waited_s < LEAVE_S or wait_s is not None
        return super().look(waited_s, wait_s)

    @torch.no_grad()
    def write(self) -> None:
        """theta <- the versions that the learner holds, replacing all local progress."""
        assert self._boundary.core is not None
        for fragment in self._boundary.core.exported:
            fragment.tensors.restore()
        self._boundary.written()

    def missing(self) -> Mapping[str, str]:
        """Versions that have not come, and shards that do not tell whether there are any."""
        core = self._boundary.core
        if core is None:
            return {"": "the model is not cut yet"}
        there = {c.state.shard_index: c for c in self._connections if c.is_up}
        away = {c.address: f"no answer from {c.address}" for c in self._connections if not c.is_up}
        late: dict[str, int] = {}
        for fragment in core.exported:
            i = fragment.fragment.fragment_id
            connection = there.get(fragment.fragment.shard_index)
            if connection is None:
                continue
            announced = connection.state.to_pull.newest(i)
            wanted = self._wanted.setdefault(i, announced) if announced is not None else None
            if wanted is not None and announced is not None and wanted[0] != announced[0]:  # the shard has restarted
                wanted = self._wanted[i] = announced
            if wanted is None or fragment.epoch != wanted[0] or fragment.version < wanted[1]:
                late[connection.address] = late.get(connection.address, 0) + 1
        versions = {shard: f"the last version of {n} fragments of {shard}" for shard, n in late.items()}
        return (self.unmerged() if self._hands_over else {}) | versions | away

    def outcome(self, missing: str, *, regardless: bool) -> Finished:
        """The result of `finish`, and whether the global values go into the model."""
        core, shards = self._boundary.core, self._boundary.shards
        assert core is not None
        steps, tokens = self._boundary.trained_here()
        unmerged = core.tokens_unmerged
        due = [f for f in core.of_model if not shards.has_stopped(f.fragment.shard_index)]
        work: Literal["all", "partly", "none"] = "all"
        if any(f.tokens_since(core.tokens) > 0 for f in due):
            work = "partly"
        if steps and unmerged >= tokens:
            work = "none"
        why = [missing or "; ".join(self.unmerged().values()), self._connections.failing_pushes]
        if steps and not tokens:
            why.insert(0, "every step said tokens=0")
        elif work == "none" and shards.have_stopped:
            why.insert(0, "no round opened before the run reached its budget")
        is_global = regardless or work == "all" or shards.have_stopped
        return Finished(work, tokens, math.ceil(unmerged), is_global, "; ".join(filter(None, why)))

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being taken, so that the model must not be written."""
        core = self._boundary.core
        return core is not None and any(f.tensors.is_being_read for f in core.fragments.values())


class Leaving(Ending):
    """Ends with all of the learner's work in a version.

    The learner tells each shard which fragments hold work that nobody else has. The shard opens an extra round for
    each, and the learner contributes as usual. A contribution in flight is waited for first.
    """

    usual_s = LEAVE_S
    waits = "waiting until this learner's work is merged"

    def missing(self) -> Mapping[str, str]:
        return self.unmerged()


class Patience:
    """Logs one wait: soon, and then now and then. Times are seconds of any clock."""

    def __init__(self, log: Log, what: str, began: float) -> None:
        self._log = log
        self._what = what
        self._began = began
        self._say_at = began + FIRST_S
        self._has_said = False

    def still(self, why: str, now: float) -> None:
        if now >= self._say_at:
            self._log.event(self._what, for_s=round(now - self._began), why=why)
            self._say_at = now + SAY_EVERY_S
            self._has_said = True

    def over(self, now: float) -> None:
        """Log the end of the wait, if the wait itself was logged."""
        if self._has_said:
            self._log.event(f"{self._what}: done", for_s=round(now - self._began))
