"""The step boundary: events in, acts out. Owned by the training thread.

It passes the events that the council has decided on to the core, in order, and takes the snapshots that rounds ask for.
It returns everything else to do as plain values. It neither waits nor sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diloco_common.errors import DilocoError
from diloco_common.ports import World
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Pulse
from diloco_worker.core.agreement import Shards
from diloco_worker.core.council_log import Turn
from diloco_worker.core.events import (
    Act,
    Answered,
    Arrived,
    Asked,
    Event,
    Failed,
    Figures,
    Joined,
    ModelCut,
    OfferSeed,
    PushContribution,
    Stopped,
    VersionApplied,
    WorkCarried,
)
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.shell.council import Council

SEED_HOLD_S = 10.0
"""Seconds for which a learner without a fragment lets others seed it, if a run is under way: they may have trained it.

A resumed learner also waits in a new run, so that the model is all a new learner's, not a mixture. If nobody seeds the
fragment, the learner's own values are the best there are."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a learner's counts begin: at 0, or where an earlier process ended."""

    inner_step: int = 0
    tokens: int = 0
    tokens_seen: int = 0
    """Tokens merged into the versions that an earlier process had seen."""
    resumed: bool = False
    """Whether the model holds values of this run, from a checkpoint."""


class StepBoundary:
    """Connects one learner's core and its shards with the council that feeds them. All ranks make the same calls."""

    def __init__(
        self, replica: Replica, addresses: Sequence[str], council: Council, pulse: Callable[[], Pulse], world: World,
        start: Start, after_version: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """`pulse`: the state of the run, as known here. `after_version`: called after versions were written."""
        self.core: LearnerCore | None = None
        """None until the first shard says how to cut the model."""
        self.shards = Shards(len(addresses))
        self.is_resumed = start.resumed
        self.replica = replica
        self._addresses = addresses
        self._council = council
        self._pulse = pulse
        self._is_stop_asked = False
        self.leave_asked_at: float | None = None
        """Time at which this process was asked to leave."""
        self._clock = world.clock
        self._cpu_clock = world.cpu_clock
        self._start = start
        self._after_version = after_version
        self._empty_since: dict[int, tuple[int, float]] = {}  # fragment -> its shard's epoch, and since when
        self._acts: list[Act] = []

    @property
    def pulse(self) -> Pulse:
        return self._council.pulse(self._pulse())

    @property
    def is_stop_asked(self) -> bool:
        """Whether to stop, regardless of the shards."""
        return self._council.stops(is_asked=self._is_stop_asked)

    def ask_stop(self) -> None:
        """Make `is_stop_asked` true soon. May be called in any thread, and in signal handlers."""
        self._is_stop_asked = True

    @property
    def is_alone(self) -> bool:
        return self._council.is_alone

    @property
    def is_leave_asked(self) -> bool:
        """Whether to hand over the work and leave."""
        return self._council.leaves(is_asked=self.leave_asked_at is not None)

    def ask_leave(self) -> None:
        """Make `is_leave_asked` true soon. May be called in any thread, and in signal handlers."""
        self.leave_asked_at = self._clock()

    def stepped(self, tokens: int) -> None:
        self._council.stepped(self._core, tokens)

    def cross(self, apply_s: float = math.inf) -> list[Act]:
        """Apply the decided events in order, and report new ones. Returns the acts, contributions included."""
        acts = self._decided(self._council.hear(), apply_s)
        if not any(isinstance(act, Failed) for act in acts):
            is_leaving = self.leave_asked_at is not None
            acts += self._council.post(self.core, self._pulse, stop=self._is_stop_asked, leave=is_leaving)
        return acts

    def _decided(self, turn: Turn, apply_s: float) -> list[Act]:
        if turn.tokens is not None:
            self._core.stepped(turn.tokens)
        self._acts = [event for event in turn.events if isinstance(event, Joined)]
        self._take_all(apply_s if self._council.is_alone else math.inf)
        acts, self._acts = [*self._acts, *turn.fetches, *turn.ended], []
        return acts

    def _take_all(self, apply_s: float) -> None:
        """Apply events until that took `apply_s` seconds. The rest waits: an event may decide about later ones, so none
        overtakes another here."""
        began = self._clock()
        try:
            while (event := self._council.pop()) is not None:
                self._take(event)
                if self.core is not None:
                    self._acts += map(WorkCarried, self.core.take_carried())
                if isinstance(event, Arrived) and self._clock() - began > apply_s:
                    break
        except DilocoError as error:
            self._acts.append(Failed(error))
        else:
            self._contribute()

    def readiness(self) -> tuple[bool, str]:
        """Whether the learner has joined every shard and holds every fragment; and what is missing."""
        there = {joined.address for joined in self.shards.joined}
        away = [address for address in self._addresses if address not in there]
        if away:
            return False, f"no answer from {', '.join(away)}"
        if self.core is None:
            return False, "the model is not cut yet"
        missing = sum(not f.is_adopted for f in self.core.fragments.values())
        if missing:
            return False, f"{missing} of {len(self.core.fragments)} fragments are not there yet"
        return True, "joined"

    def has_what_can_be_had(self, shards_up: set[int]) -> bool:
        """Whether there is a fragment from a shard, and all missing ones belong to shards that are away.

        An island waits for every shard, since ranks may see different shards up.
        """
        if self.core is None or not self._council.is_alone:
            return False
        missing = [f.fragment for f in self.core.fragments.values() if not f.is_adopted]
        return len(missing) < len(self.core.fragments) and not any(f.shard_index in shards_up for f in missing)

    def begin_without(self) -> None:
        self._core.begin_without()

    def figures(self) -> Figures:
        """The learner's progress. May be called in any thread."""
        if self.core is None:
            return Figures(self._start.inner_step, self._start.tokens)
        core = self.core
        return Figures(
            core.inner_step, core.tokens, dict(core.contributions), core.tokens_carried / len(core.of_model),
            core.unmerged, core.tokens_unmerged, self.replica.laid.undone,
        )  # fmt: skip

    def trained_here(self) -> tuple[int, int]:
        return self._core.inner_step - self._start.inner_step, self._core.tokens - self._start.tokens

    def trained(self) -> tuple[int, int]:
        """Inner steps and tokens of everything in the model. Raises what `Council.trained` raises."""
        figures = self.figures()
        return self._council.trained(figures.inner_step, figures.tokens)

    # ------------------------------------------------------------ events

    def _take(self, event: Event) -> None:
        """Raises the DilocoError that ends the learner."""
        match event:
            case Joined():
                self._joined(event)
            case Asked():
                self._core.collect(event.directive, event.epoch)
            case Answered():
                self._core.answered(event.fragment_id, event.round, event.answer, event.tokens)
                self._acts.append(event)
            case Arrived():
                self._apply(event)
            case Stopped():
                self.shards.stop(event.shard_index)
            case Failed():
                raise event.error

    @property
    def _core(self) -> LearnerCore:
        assert self.core is not None
        return self.core

    def _joined(self, joined: Joined) -> None:
        """A shard gave a lease. The first one says how to cut the model; once all have joined, seed what is empty."""
        is_new = self.shards.join(joined)
        if self.core is None:
            self._cut(joined)
        self._core.rejoined(joined.fragments, joined.epoch)
        if self.shards.are_complete:
            for shard in self.shards.joined if is_new else (joined,):
                self._seed(shard)

    def _cut(self, first: Joined) -> None:
        manifest = cut(self.replica.specs, first.num_fragments, first.num_shards)
        self.core = LearnerCore(self.replica, manifest, first.policy)
        self.core.inner_step, self.core.tokens = self._start.inner_step, self._start.tokens
        self._acts.append(ModelCut(manifest, {i: f.tensors for i, f in self.core.fragments.items()}))

    def _seed(self, joined: Joined) -> None:
        """Offer the fragments that the shard lacks: at the start, and when it comes back empty."""
        for status in joined.fragments:
            if not status.seeded:
                others_may_know_more = self.is_resumed or self.pulse.tokens_merged > 0
                fragment = self._core.fragments[status.fragment_id]
                is_held = others_may_know_more and not fragment.is_adopted
                hold_s = self._hold_s(status.fragment_id, joined.epoch) if is_held else 0.0
                if (own := fragment.tensors.fragment.own).stop > own.start:
                    values = fragment.tensors.values()[own]
                    self._acts.append(OfferSeed(status.fragment_id, values, hold_s))

    def _hold_s(self, fragment_id: int, epoch: int) -> float:
        """Seconds left of the hold, since this epoch of the shard was first seen without the fragment.

        It does not restart at each Join: with a lease shorter than the hold, the learner would never seed.
        """
        known_epoch, since = self._empty_since.get(fragment_id, (0, 0.0))
        if known_epoch != epoch:
            since = self._clock()
            self._empty_since[fragment_id] = epoch, since
        return max(0.0, SEED_HOLD_S - (self._clock() - since))

    @torch.no_grad()
    def take_global(self) -> None:
        """theta <- the versions that the learner holds, replacing all local progress."""
        for fragment in self._core.exported:
            fragment.tensors.restore()
        self.written()

    @torch.no_grad()
    def written(self) -> None:
        """Values that no inner step produced were written to the model: let the loop clamp or project them."""
        if self._after_version is not None:
            self._after_version()
            self.replica.laid.settled()

    @torch.no_grad()
    def _apply(self, event: Arrived) -> None:
        began, cpu_began = self._clock(), self._cpu_clock()
        fragment = self._core.fragments[event.fragment_id]
        self._council.applies(event, fragment.contribution)
        replaced = fragment.tensors.anchor, fragment.contribution, event.difference
        applied = self._core.arrived(
            event.fragment_id, event.version, event.epoch, event.values, event.merged_version, event.difference,
            event.forgotten_version,
        )  # fmt: skip
        if applied is not None:
            self.written()
            seconds, cpu_seconds = self._clock() - began, self._cpu_clock() - cpu_began
            since = self._core.tokens - fragment.tokens_since(self._core.tokens)
            self._acts.append(
                VersionApplied(
                    event.fragment_id, event.version, event.epoch, event.values, applied.contribution, applied.fate,
                    since, seconds, cpu_seconds, replaced,
                )
            )  # fmt: skip

    @torch.no_grad()
    def _contribute(self) -> None:
        if self.core is None:
            return
        began = self._cpu_clock()
        taken = self.core.contribute()
        cpu_seconds = (self._cpu_clock() - began) / max(1, len(taken))
        for contribution in taken:
            self._council.contributes(contribution)
            self._acts.append(PushContribution(contribution, cpu_seconds))
