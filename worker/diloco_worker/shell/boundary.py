"""The step boundary: events in, acts out. Owned by the training thread.

Takes events that the council has decided on into the core, in their order, and the snapshots that rounds ask for.
Returns what else is to be done about them, as plain values. Waits for nothing and sends nothing.
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
from diloco_worker.core.acts import Act, Figures, ModelCut, OfferSeed, PushContribution, VersionApplied, WorkCarried
from diloco_worker.core.agreement import Shards
from diloco_worker.core.council_log import Turn
from diloco_worker.core.events import Answered, Arrived, Asked, Event, Failed, Joined, Stopped
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.shell.council import Council

SEED_HOLD_S = 10.0
"""Where a run is under way, a learner that has nothing of a fragment yet lets those seed it that have trained on it.

So does one that was resumed where there is no run: a model that begins anew is that of a new learner, and not some
fragments of the one and some of the other. If nobody comes, its values are the best that there are."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a learner begins: at nothing, or where an earlier process has ended."""

    inner_step: int = 0
    """Where the count of inner steps goes on."""
    tokens: int = 0
    """Where the count of tokens goes on."""
    tokens_seen: int = 0
    """Merged into the versions that an earlier process had seen."""
    resumed: bool = False
    """The model holds values of this run, of a checkpoint."""


class StepBoundary:
    """The core of one learner, what has joined, and the council that both are fed from. Ranks call it alike."""

    def __init__(
        self, replica: Replica, addresses: Sequence[str], council: Council, pulse: Callable[[], Pulse], world: World,
        start: Start, after_version: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """`pulse`: the state of the run, over all learners, as this process hears it. `after_version`: called when
        versions were written to the model."""
        self.core: LearnerCore | None = None
        """None until the first shard tells how the model is cut."""
        self.shards = Shards(len(addresses))
        self.is_resumed = start.resumed
        self.replica = replica
        self._addresses = addresses
        self._council = council
        self._pulse = pulse
        self._is_stop_asked = False
        self.leave_asked_at: float | None = None
        """When this process was asked to."""
        self._clock = world.clock
        self._cpu_clock = world.cpu_clock
        self._start = start
        self._after_version = after_version
        self._empty_since: dict[int, tuple[int, float]] = {}  # fragment -> epoch of its shard, and since when
        self._acts: list[Act] = []

    @property
    def pulse(self) -> Pulse:
        """The state of the run."""
        return self._council.pulse(self._pulse())

    @property
    def is_stop_asked(self) -> bool:
        """Whether to stop, whatever the shards say."""
        return self._council.stops(is_asked=self._is_stop_asked)

    def ask_stop(self) -> None:
        """Make `is_stop_asked` true, soon. In any thread, and in signal handlers."""
        self._is_stop_asked = True

    @property
    def is_alone(self) -> bool:
        """Whether no other rank steps with this process."""
        return self._council.is_alone

    @property
    def is_leave_asked(self) -> bool:
        """Whether to hand over what is trained, and go."""
        return self._council.leaves(is_asked=self.leave_asked_at is not None)

    def ask_leave(self) -> None:
        """Make `is_leave_asked` true, soon. In any thread, and in signal handlers."""
        self.leave_asked_at = self._clock()

    def stepped(self, tokens: int) -> None:
        """An inner step on so many tokens has ended."""
        self._council.stepped(self._core, tokens)

    def cross(self, apply_s: float = math.inf) -> list[Act]:
        """Take in what is decided, in order, and say what came. Returns what to do about it, contributions included."""
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
        """Stops at a version that cannot be applied while its fragment is read, and once applying took `apply_s`
        seconds: an event may decide over those after it, so none overtakes another here."""
        began = self._clock()
        try:
            while (event := self._council.pop()) is not None:
                if isinstance(event, Arrived) and self._core.is_being_read(event.fragment_id):
                    self._council.put_back(event)
                    break
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
        """Whether the learner has joined every shard and holds every fragment, and what is missing."""
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
        """Whether there is a fragment from a shard, and all that are missing are of shards that are away.

        Several ranks wait for every shard: what is up differs between them.
        """
        if self.core is None or not self._council.is_alone:
            return False
        missing = [f.fragment for f in self.core.fragments.values() if not f.is_adopted]
        return len(missing) < len(self.core.fragments) and not any(f.shard_index in shards_up for f in missing)

    def begin_without(self) -> None:
        """Train on from the model's own values where no version has come."""
        self._core.begin_without()

    def figures(self) -> Figures:
        """How far the learner is. In any thread."""
        if self.core is None:
            return Figures(self._start.inner_step, self._start.tokens)
        core = self.core
        return Figures(
            core.inner_step, core.tokens, dict(core.contributions), core.tokens_carried / len(core.of_model),
            core.unmerged, core.tokens_unmerged, self.replica.laid.undone,
        )  # fmt: skip

    def trained_here(self) -> tuple[int, int]:
        """Inner steps and tokens of this process."""
        return self._core.inner_step - self._start.inner_step, self._core.tokens - self._start.tokens

    def trained(self) -> tuple[int, int]:
        """Inner steps and tokens of everything that the model holds. Raises as `Council.trained`."""
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
        """A shard gave a lease: the first one tells how the model is cut; once all did, seed what is empty."""
        is_new = self.shards.join(joined)
        if self.core is None:
            self._cut(joined)
        self._core.rejoined(joined.fragments, joined.epoch)
        if self.shards.are_complete:
            for shard in self.shards.joined if is_new else (joined,):
                self._seed(shard)

    def _cut(self, first: Joined) -> None:
        """Cut the model as a shard says that all do."""
        manifest = cut(self.replica.specs, first.num_fragments, first.num_shards)
        self.core = LearnerCore(self.replica, manifest, first.policy)
        self.core.inner_step, self.core.tokens = self._start.inner_step, self._start.tokens
        self._acts.append(ModelCut(manifest, {i: f.tensors for i, f in self.core.fragments.items()}))

    def _seed(self, joined: Joined) -> None:
        """Offer the fragments that the shard lacks: at the start, and when it came back with nothing."""
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
        """What is left of the hold that began when this epoch of the shard was first seen without the fragment.

        It is not counted from each Join. A lease may be shorter than the hold, and the learner would never seed.
        """
        known_epoch, since = self._empty_since.get(fragment_id, (0, 0.0))
        if known_epoch != epoch:
            since = self._clock()
            self._empty_since[fragment_id] = epoch, since
        return max(0.0, SEED_HOLD_S - (self._clock() - since))

    @torch.no_grad()
    def written(self) -> None:
        """Values that no inner step has led to are in the model: the loop puts them into the set that it keeps."""
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
