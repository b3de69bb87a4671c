"""Carries out a shard's effects: tell, seed, merge, and record facts.

It turns a seed or a closed round into a version: compute it, make it durable, announce it. A `Shell` provides the
means: the host has threads and a disk; the lockstep shards of the lab and the tests do the work at once.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from diloco_common.codec.change import VALUES
from diloco_common.observe.metrics.shard import ComputePhase
from diloco_common.ports import Clock
from diloco_common.wire.manifest import Fragment
from diloco_common.wire.messages import Directive
from diloco_server.core import arithmetic
from diloco_server.core.arithmetic import Published, Values, VersionRules
from diloco_server.core.effects import Effect, MergeRound, SeedFragment, Tell, TellAll
from diloco_server.core.fragment import FragmentState
from diloco_server.core.influence import Direction, directions
from diloco_server.core.ledger import Fact
from diloco_server.core.outer import TakeMean, make_outer_optimizer
from diloco_server.core.record import Record
from diloco_server.core.shard import Shard
from diloco_server.shell.rules import find_rules
from diloco_server.storage.version_file import StoredVersion

T = TypeVar("T")
Job: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""Makes a version and passes it to the core. May raise."""


class Shell(Protocol):
    """Carries out effects."""

    clock: Clock
    stopwatch: Clock
    """Measures work in the thread that does it."""

    def tell(self, tell: Tell) -> None: ...

    def start(self, job: Job, name: str) -> None:
        """Run a job, soon or at once."""

    async def compute(self, phase: ComputePhase, work: Callable[[], T]) -> T:
        """Run arithmetic, in the order of the calls."""

    def failed(self, merge: MergeRound, error: Exception) -> None:
        """End the shard, because a failed merge left values that belong to no version."""

    async def keep(self, version: StoredVersion) -> None:
        """Make a version durable. It may be announced once this returns."""


class Witness(Protocol):
    """Observes events. Changes nothing."""

    def note(self, event: Fact) -> None: ...

    def merging(self, merge: MergeRound) -> None:
        """A closed round is about to be merged."""

    def merged(self, seconds: float) -> None:
        """Seconds that the merge and the outer step took."""

    def announcing(self, state: FragmentState) -> None:
        """A version is durable, but not announced yet."""


class EffectDriver:
    def __init__(self, shard: Shard, shell: Shell, witness: Witness) -> None:
        outer = shard.settings.outer
        self.rules = find_rules(shard.settings)
        self._of_model = VersionRules(
            self.rules.merge, make_outer_optimizer(outer, self.rules.outer), outer.average, outer.momentum == "auto"
        )
        self._as_merged = VersionRules("mean", TakeMean(outer))
        self._shard, self._shell, self._witness = shard, shell, witness
        self._sync = shard.settings.sync
        self.is_mirrored: Callable[[], bool] = lambda: False
        """Whether a mirror follows. If so, versions are hashed."""
        self.tell_readers: Callable[[Directive], None] = lambda directive: None
        """Receives every directive that goes to all learners."""

    def rules_of(self, fragment: Fragment) -> VersionRules:
        """How to make versions of this fragment. The settings apply to the model; other kinds have their own rules."""
        return self._of_model if fragment.traits.is_of_model else self._as_merged

    def carry_out_all(self) -> None:
        while effects := self._shard.take_effects():
            for effect in effects:
                self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Tell():
                self._shell.tell(effect)
            case TellAll():
                for member in effect.members:
                    self._shell.tell(Tell(member.learner_id, member.generation, effect.directive))
                self.tell_readers(effect.directive)
            case SeedFragment():
                self._shell.start(partial(self._seed, effect), f"seed-{effect.fragment_id}")
            case MergeRound():
                self._witness.merging(effect)
                self._shell.start(partial(self._merge, effect), f"merge-{effect.fragment_id}")
            case _:
                self._witness.note(effect)

    async def _seed(self, effect: SeedFragment) -> None:
        fragment = self._shard.fragments[effect.fragment_id].fragment
        rules = self.rules_of(fragment)

        def work() -> tuple[Values, Published]:
            values = arithmetic.seed(effect.payload, rules.optimizer)
            return values, self._publish(values, fragment)

        try:
            values, published = await self._shell.compute("seed", work)
            record = self._shard.versions.seed_record(effect.fragment_id)
            await self._shell.keep(self._version(record, values, published))
        except Exception:
            self._shard.fragments[effect.fragment_id].fail_seed()
            raise
        self._shard.versions.seeded(record, values, published)
        self._witness.announcing(self._shard.fragments[effect.fragment_id])

    async def _merge(self, effect: MergeRound) -> None:
        state = self._shard.fragments[effect.fragment_id]
        values, before, stopwatch = state.values, state.published, self._shell.stopwatch
        assert values is not None
        rules = self.rules_of(state.fragment)
        if rules.rule == "auto":
            rules = replace(rules, rule=self._shard.versions.merge_rule())

        def work() -> tuple[Published, dict[str, Direction], float]:
            began = stopwatch()
            arithmetic.step(
                values, state.fragment, (*effect.contributions, *effect.beside),
                outer_step=effect.version, rules=rules,
            )  # fmt: skip
            found: dict[str, Direction] = {}
            if state.fragment.traits.is_of_model:
                found = directions(
                    effect.contributions, effect.left_out, state.fragment.num_elements, state.said,
                    median=self._shard.influence.strangers,
                )  # fmt: skip
            merged_s = stopwatch() - began
            return self._publish(values, state.fragment, before), found, merged_s

        try:
            published, found, merged_s = await self._shell.compute("merge", work)
            self._witness.merged(merged_s)
            record = self._shard.versions.next_record(effect.fragment_id)
            await self._shell.keep(self._version(record, values, published))
        except Exception as error:
            self._shell.failed(effect, error)
            raise
        now = self._shell.clock()
        if state.fragment.traits.is_of_model:
            self._shard.hear(record.fragment_id, found, now)
        self._shard.committed(record, published, now)
        self._witness.announcing(state)

    def _publish(self, values: Values, fragment: Fragment, before: Published | None = None) -> Published:
        published = arithmetic.publish(values, fragment.encoding(self._sync.pull), before)
        return published.named() if self.is_mirrored() else published

    def _version(self, record: Record, values: Values, published: Published) -> StoredVersion:
        pull = self._shard.fragments[record.fragment_id].fragment.encoding(self._sync.pull)
        anchor = None if pull in VALUES else published.values
        return StoredVersion(record, values, anchor)
