"""Bounded influence, implemented independently, with the product's limits: what a hostile learner must not get from a
shard (more rounds, a version of its own, values that are not finite), how much a member's contribution counts, and
which learners are left out. `Fairness` and `BoundedInfluence` follow histories as they are written, and look at a
shard's state at that moment. The healthy contributions of members all point the same way in the simulator. So values
alone say which contributions are spoiled, how far each points away, and when its shard must have noticed.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import torch

from diloco_common.wire.manifest import Fragment
from diloco_server.core.influence import APART, ERRORS, FALLS, FEW, LITTLE, OPPOSED, RISES, TOLD, TWICE
from diloco_server.core.ledger import Event, LearnerJoined, LearnerLeftOut, LearnerTakesPart
from diloco_server.core.round import Contribution, LengthLimit, Round
from diloco_server.core.shard import Shard
from diloco_simulator.processes import Processes
from diloco_simulator.verify import invariants
from diloco_simulator.verify.published import decoded
from diloco_simulator.world.stage import PATTERN, part_of

SPARE_ROUNDS = 3
"""Extra rounds per epoch of a shard: a fragment's first round comes before H steps, and steps are reported late."""
SPARE_ROUNDS_OF_A_BUDGET = 10
"""The same if the run has a budget: at the end of the run, rounds do not wait for H steps."""


class Fairness:
    """Watches one cluster that has hostile learners."""

    def __init__(self, cluster: Processes) -> None:
        self._cluster = cluster
        self._options = cluster.options
        self._steps = 0  # steps of honest learners
        self._opened: Counter[tuple[str, int]] = Counter()  # shard and fragment -> number of rounds
        self._epochs: Counter[str] = Counter()  # shard -> number of epochs
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
        assert options.quorum != "all", "a round that waits for all also waits for hostile learners"
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


ABOUT = 0.1
"""A lean this close to its bound may be on either side. Encoding turns contributions a little, and also those that the
product compares them with (by 0.04 in a schedule with int4 and snapshots taken while training)."""
HEALTHY = 0.9
"""Minimum cosine between a healthy contribution and what was trained."""


@dataclass
class _EpochBounds:
    """One epoch of a shard."""

    counted: dict[tuple[int, str], LengthLimit] = field(default_factory=dict)
    """Fragment and learner -> the length for which its last contribution counted."""
    pointed: dict[str, deque[float]] = field(default_factory=dict)
    """Learner -> the cosines between its last compared contributions and what was trained."""
    out: set[str] = field(default_factory=set)
    opened: dict[int, set[str]] = field(default_factory=dict)
    """Fragment -> the learners that were left out when its round opened, if the same process still speaks for them."""
    closed: dict[int, Round] = field(default_factory=dict)
    seq: int = 0
    """Number of the last event seen."""
    judges: set[int] = field(default_factory=set)
    """Generations that took part when last looked at."""

    def begin(self, learner_id: str) -> None:
        """Another process now speaks for this learner."""
        self.out.discard(learner_id)
        self.pointed.pop(learner_id, None)
        self.counted = {key: limit for key, limit in self.counted.items() if key[1] != learner_id}
        for left_out in self.opened.values():
            left_out.discard(learner_id)


class BoundedInfluence:
    """Follows the shards of a cluster of members."""

    def __init__(self, cluster: Processes) -> None:
        self._cluster = cluster
        self._sickness = sickness = cluster.options.sickness
        self._stuck = cluster.learner_ids[sickness.learner] if sickness is not None and sickness.how == "stuck" else ""
        self._followed: dict[str, _EpochBounds] = {}

    def heard(self, name: str, what: str, facts: dict[str, Any]) -> None:
        if what == "born" and facts["role"] == "shard":
            self._followed[name] = _EpochBounds()
        elif what in ("joined", "opened", "merging", "announced"):
            host = self._cluster.shards[int(name.removeprefix("shard-"))].host
            assert host is not None
            shard, followed = host.shard, self._followed[name]
            closed = followed.closed.pop(facts["fragment"], None) if what == "announced" else None
            news = [event for event in shard.ledger.events if event.seq > followed.seq]
            followed.seq = max((event.seq for event in news), default=followed.seq)
            since = math.inf  # the verdicts of a round come with its version
            if closed is not None:
                since = shard.rounds.every.announced_at[facts["fragment"]]
            verdicts = [e for e in news if e.at >= since and isinstance(e.fact, LearnerLeftOut | LearnerTakesPart)]
            self._catch_up(followed, shard, [event for event in news if event not in verdicts])
            if what == "opened":
                judges = len(_judges(followed, shard))
                invariants.somebody_judges_those_left_out(facts["fragment"], followed.out, judges)
                followed.opened[facts["fragment"]] = followed.out.copy()
            elif what == "merging":
                self._merging(followed, shard, facts)
            elif closed is not None:
                known = [c for c in closed.contributions.values() if _is_known(shard, c)]
                compared = self._compared(followed, known, closed, shard.fragments[facts["fragment"]].fragment)
                self._judged(followed, compared, len(known), verdicts)
            followed.judges = _judges(followed, shard)

    def _catch_up(self, followed: _EpochBounds, shard: Shard, news: Sequence[Event]) -> None:
        for event in news:
            match event.fact:
                case LearnerJoined(learner_id=learner_id, generation=generation):
                    member = shard.membership.get(learner_id)
                    if member is not None and member.first_generation >= generation:
                        followed.begin(learner_id)
                case LearnerTakesPart(learner_id=learner_id):
                    stayed = followed.judges & _judges(followed, shard)
                    invariants.only_the_healed_take_part_again(learner_id, is_back=len(stayed) < 2)
                    followed.out.discard(learner_id)
                    followed.pointed.clear()

    # ------------------------------------------------------------ lengths

    def _merging(self, followed: _EpochBounds, shard: Shard, facts: dict[str, Any]) -> None:
        fragment_id = facts["fragment"]
        state = shard.fragments[fragment_id]
        closed = state.closed
        assert closed is not None
        opened, held = followed.opened.get(fragment_id, set()), closed.contributions.keys()
        left_out = {c["learner"] for c in facts.get("left_out", ())}
        invariants.exactly_the_left_out_are_not_merged(
            fragment_id, left_out, at_least=opened & followed.out & held, at_most=(opened | followed.out) & held
        )
        if not state.fragment.traits.is_whole:
            part = [c for c in closed.parted()[0] if c.norm > 0]
            self._bound(followed, fragment_id, part, state.record.limit, closed.limit)
        if state.fragment.traits.is_of_model:
            followed.closed[fragment_id] = closed

    def _bound(
        self, followed: _EpochBounds, fragment_id: int, part: Sequence[Contribution], before: LengthLimit | None,
        after: LengthLimit | None,
    ) -> None:  # fmt: skip
        """Check how much of each length is kept, and the limit for the next round."""
        weight = sum(c.weight for c in part)
        for c in part:
            limits = [limit for limit in (before, followed.counted.get((fragment_id, c.learner_id))) if limit]
            known = max((limit.at(c.steps) for limit in limits), default=0.0)
            if len(part) < 3:
                low = high = math.inf if before is None else RISES * known
            elif 2 * c.weight > weight:
                low = high = math.inf
            else:
                second = _second(part, c.steps)
                low, high = (max(times * second, FALLS * known) for times in (APART, TWICE))
            invariants.lengths_are_bounded_by_the_round(fragment_id, c.learner_id, c.norm * c.kept, c.norm, low, high)
            counts = c.norm * c.kept if len(part) >= 3 else min(c.norm, low / 2)
            followed.counted[fragment_id, c.learner_id] = LengthLimit(counts, c.steps)
        if len(part) < 3:
            expected = before
        else:
            steps = sorted(c.steps for c in part)[-2]
            told = LengthLimit(_second(part, steps), steps)
            fallen = told if before is None else LengthLimit(FALLS * before.length, before.steps)
            expected = max(told, fallen, key=lambda limit: limit.at(max(told.steps, fallen.steps)))
        invariants.limits_follow_the_round(fragment_id, after, expected)

    # ------------------------------------------------------------ directions

    def _compared(
        self, followed: _EpochBounds, known: Sequence[Contribution], closed: Round, fragment: Fragment
    ) -> set[str]:
        """Note where contributions point, if they can be compared with two others. Returns their learners."""
        if self._sickness is None:
            return set()  # whatever they do, nobody is left out
        held = [c for c in closed.contributions.values() if c.norm > 0]
        merged = [c for c in held if c.learner_id not in closed.beside]
        if len(merged) < (3 if len(merged) == len(held) else 2):
            return set()
        longest = max((c.kept * c.norm for c in known if c.learner_id not in followed.out), default=0.0)
        compared = [
            c for c in known if c.norm > 0 and (c.learner_id in followed.out or c.kept * c.norm >= LITTLE * longest)
        ]
        for c in compared:
            followed.pointed.setdefault(c.learner_id, deque(maxlen=TOLD)).append(_along(c, fragment))
        return {c.learner_id for c in compared}

    def _judged(
        self, followed: _EpochBounds, compared: Collection[str], learners: int, verdicts: Sequence[Event]
    ) -> None:
        """Check who is left out from now on, and who takes part again. `learners`: the number in the round."""
        out = {e.fact.learner_id for e in verdicts if isinstance(e.fact, LearnerLeftOut)}
        back = {e.fact.learner_id for e in verdicts if isinstance(e.fact, LearnerTakesPart)}
        for learner_id in sorted(out | back | set(compared)):
            pointed = followed.pointed.get(learner_id, ())
            leans, is_full = [-cosine - OPPOSED for cosine in pointed], len(pointed) == TOLD
            beyond_chance = fmean(leans) - ERRORS * stdev(leans) / math.sqrt(len(leans)) if is_full else -math.inf
            if learner_id in followed.out:
                invariants.only_the_healed_take_part_again(
                    learner_id, is_back=learner_id not in back or (is_full and fmean(leans) < ABOUT)
                )
                is_healed = is_full and fmean(leans) < -ABOUT and min(pointed) > HEALTHY
                invariants.the_healed_take_part_again(learner_id, is_back=learner_id in back or not is_healed)
            else:
                repeats = learner_id == self._stuck and is_full
                may = (beyond_chance > -ABOUT and learners <= FEW) or repeats
                invariants.nobody_healthy_is_left_out(learner_id, is_sick=learner_id not in out or may)
                must = beyond_chance > ABOUT and learners <= FEW
                invariants.the_sick_are_left_out(learner_id, [*pointed], is_out=learner_id in out or not must)
        followed.out = (followed.out - back) | out
        if out or back:
            followed.pointed.clear()
            self._cluster.counts["learners left out"] += len(out)
            self._cluster.counts["learners that take part again"] += len(back)


def _judges(followed: _EpochBounds, shard: Shard) -> set[int]:
    """Generations of the learners that take part."""
    live = (m for m in shard.membership.live() if m.first_step is not None)
    return {m.generation for m in live if m.learner_id not in followed.out}


def _is_known(shard: Shard, contribution: Contribution) -> bool:
    """Whether the process that sent it still speaks for its learner."""
    member = shard.membership.get(contribution.learner_id)
    return member is not None and contribution.generation >= member.first_generation


def _second(contributions: Collection[Contribution], steps: int) -> float:
    """The second largest length of a contribution, scaled to this many steps."""
    return sorted(c.norm * max(1.0, steps / c.steps) for c in contributions)[-2]


def _along(contribution: Contribution, fragment: Fragment) -> float:
    """The cosine between a contribution and what any learner trains."""
    return float(torch.cosine_similarity(decoded(contribution), -part_of(PATTERN, fragment).double(), dim=0))
