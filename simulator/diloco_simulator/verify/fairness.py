"""What hostile learners must not get from a shard: more rounds, a version of their own, or values that are not finite.

It follows the histories of shards and learners as they are written, and looks at the shard's state at that moment.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from diloco_server.core.round import Contribution
from diloco_simulator.processes import Processes
from diloco_simulator.verify import invariants

SPARE_ROUNDS = 3
"""Per epoch of a shard: a fragment's first round comes before H steps, and steps are reported a moment late."""
SPARE_ROUNDS_OF_A_BUDGET = 10
"""At the end of a run, rounds do not wait for H steps."""


class Fairness:
    """Watches one cluster that has hostile learners."""

    def __init__(self, cluster: Processes) -> None:
        self._cluster = cluster
        self._options = cluster.options
        self._steps = 0  # of honest learners
        self._opened: Counter[tuple[str, int]] = Counter()  # shard and fragment -> rounds
        self._epochs: Counter[str] = Counter()  # of shards
        self._merging: dict[tuple[str, int], tuple[Any, tuple[Contribution, ...]]] = {}
        """Shard and fragment -> values before the merge in progress, and its contributions."""

    def heard(self, name: str, what: str, facts: dict[str, Any]) -> None:
        match what:
            case "stepped":
                self._steps += 1
            case "born" if facts["role"] == "shard":
                self._epochs[name] += 1
                self._merging = {key: merging for key, merging in self._merging.items() if key[0] != name}
            case "opened":
                self._opened[name, facts["fragment"]] += 1
                self._rounds(name, facts["fragment"])
            case "merging":
                self._weights(name, facts["fragment"])
            case "announced":
                self._values(name, facts["fragment"])

    def _rounds(self, name: str, fragment_id: int) -> None:
        options = self._options
        assert options.quorum != "all", "a round that waits for all waits for liars"
        steps_each = self._cluster.timeline.now / min(options.step_s)
        plausible = options.hostile * steps_each
        spare = SPARE_ROUNDS_OF_A_BUDGET if options.budget else SPARE_ROUNDS
        at_most = (self._steps + plausible) / options.sync_every + spare * self._epochs[name]
        invariants.rounds_follow_honest_steps(fragment_id, self._opened[name, fragment_id], at_most)

    def _weights(self, name: str, fragment_id: int) -> None:
        state = self._cluster.fragment(name, fragment_id)
        assert state.closed is not None
        assert state.values is not None
        contributions = tuple(state.closed.contributions.values())
        invariants.nobody_outweighs_a_round(fragment_id, [(c.learner_id, c.weight) for c in contributions])
        self._merging[name, fragment_id] = state.values.theta.clone(), contributions

    def _values(self, name: str, fragment_id: int) -> None:
        state = self._cluster.fragment(name, fragment_id)
        assert state.values is not None
        theta = state.values.theta
        invariants.values_stay_finite(fragment_id, theta)
        before, contributions = self._merging.pop((name, fragment_id), (None, ()))
        honest = [c for c in contributions if c.learner_id not in self._cluster.claimants]
        if before is not None and 2 * len(honest) > len(contributions):
            invariants.a_minority_moves_nothing(fragment_id, theta, before, max(c.norm for c in honest))
