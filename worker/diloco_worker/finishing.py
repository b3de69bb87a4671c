"""The end of a run: the last version of every fragment of the model, and then it holds nothing but those.

A shard that has reached the budget makes no versions any more, and what it announced last is final. Where training ends
earlier, the versions count that were announced when `finish` was called: others go on, and would announce for ever.
Work of this learner that is on its way gets some seconds to be in them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diloco_worker.boundary import StepBoundary
from diloco_worker.connections import Connections
from diloco_worker.council import Council
from diloco_worker.ending import Ending

CONTRIBUTIONS_S = 5.0
"""The rounds that hold work of this learner have so many seconds to become versions."""
FINISH_S = 60.0
"""For the last versions; what is waited for is a pull of each fragment, at most."""


class Finishing(Ending):
    """What is still missing of the last versions."""

    usual_s = FINISH_S

    def __init__(self, boundary: StepBoundary, connections: Connections, council: Council) -> None:
        super().__init__(boundary, connections, council)
        self._wanted: dict[int, tuple[int, int]] = {}  # fragment -> epoch and version, as announced first

    @torch.no_grad()
    def write(self) -> None:
        """theta <- the values of the versions that the learner holds, in place of all local progress."""
        assert self._boundary.core is not None
        for fragment in self._boundary.core.exported:
            fragment.tensors.restore()

    def missing(self) -> Mapping[str, str]:
        """The versions that have not come, and the shards that do not say whether there are some."""
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
            announced = connection.newest(i)
            wanted = self._wanted.setdefault(i, announced) if announced is not None else None
            if wanted is not None and announced is not None and wanted[0] != announced[0]:  # the shard has restarted
                wanted = self._wanted[i] = announced
            if wanted is None or fragment.epoch != wanted[0] or fragment.version < wanted[1]:
                late[connection.address] = late.get(connection.address, 0) + 1
        return away | {shard: f"the last version of {n} fragments of {shard}" for shard, n in late.items()}

    def is_settling(self, waited_s: float) -> bool:
        return self._has_contributions and waited_s < CONTRIBUTIONS_S

    @property
    def _has_contributions(self) -> bool:
        """Whether work of this learner is on its way into a version of the model."""
        core = self._boundary.core
        if core is None or self._boundary.shards.have_stopped:
            return False
        return any(fragment.contribution is not None for fragment in core.of_model)

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being taken: not the moment to write to the model."""
        core = self._boundary.core
        return core is not None and any(f.tensors.is_being_read for f in core.fragments.values())
