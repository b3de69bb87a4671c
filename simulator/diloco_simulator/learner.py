"""One learner process: the core `LearnerCore`, its training loop and links, as diloco_worker/learner.py wires them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from diloco_common.codec import Payload
from diloco_common.errors import DilocoError
from diloco_common.manifest import cut
from diloco_common.messages import Progress
from diloco_simulator import invariants
from diloco_simulator.arithmetic import Value, arithmetic_of
from diloco_simulator.link import LinkContext, ShardLink
from diloco_simulator.network import Network
from diloco_simulator.options import Options
from diloco_simulator.timeline import Process
from diloco_simulator.truth import Origin, Truth
from diloco_worker.core.events import Answered, Arrived, Asked, Event, EventQueue, Failed, Joined, Stopped
from diloco_worker.core.fragment import LearnerFragment, Pending
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.shards import Shards

_cut = lru_cache(64)(cut)
JOINING_S = 0.2
SETTLE_S = 5.0
APPLIES_LAST = 0.2
"""How often a version is the last that a step applies, although more has come."""


class SimulatedLearner:
    """A process that trains. `state`: "joining", "training", "leaving", "done", or "failed"."""

    def __init__(
        self, learner_id: str, process_id: str, number: int, process: Process, network: Network, options: Options,
        truth: Truth, note: Callable[..., None],
    ) -> None:  # fmt: skip
        self.learner_id = learner_id
        self.process_id = process_id
        self.process = process
        self.state = "joining"
        self.core: LearnerCore | None = None
        self.error: DilocoError | None = None
        self.hung_until = 0.0
        """The training loop does nothing until then, while the network thread goes on."""
        self.unresolved: dict[int, Origin] = {}
        """Fragment -> contribution that is pending."""
        self._options = options
        self._truth = truth
        self._note = note
        self._arithmetic = arithmetic_of(options.arithmetic)
        self._model, self._replica = self._arithmetic.model(10.0 + number, options.fragments)
        self._random = random.Random(f"learner {options.seed} {process_id}")
        self._slow = random.Random(
            f"applies {options.seed} {process_id}"
        )  # apart: the rest of a seed stays what it was
        self._inbox = EventQueue()
        self._shards = Shards(options.shards)
        self._progress = Progress(0, 0)
        self._patterns: dict[int, Value] = {}
        self._step_s = options.step_s[number]
        self._carries = options.on_commit == "carry"
        self._counts_values = options.on_commit != "blend"
        self._origins: dict[int, tuple[Pending, Origin]] = {}  # by the pending contribution's identity
        self._fates_seen = Counter[str]()
        self._touched: set[int] = set()  # fragments that anything happened to since the last step
        self._early: dict[int, Asked] = {}
        self._thawed_at = 0.0
        context = LinkContext(
            learner_id, process_id, tuple(self._replica.specs), self._inbox, process, network, self._random,
            options.call_s, self._arithmetic, lambda: self._progress, self._encoded, note,
        )  # fmt: skip
        self.links = [ShardLink(index, context) for index in range(options.shards)]
        for link in self.links:
            process.spawn(link.run(), f"link {link.shard_index}")
        process.later(JOINING_S, self._join_on)

    # ------------------------------------------------------------ the training loop

    def _join_on(self) -> None:
        """Wait until the model holds a version of every fragment."""
        self._boundary()
        if self.state == "failed":
            return
        if self.core is not None and all(f.adopted for f in self.core.fragments.values()):
            self.state = "training"
            self._note("training", self.process_id)
            self._train_on()
        else:
            self.process.later(JOINING_S, self._join_on)

    def _train_on(self) -> None:
        takes_s = self._step_s * self._random.uniform(0.8, 1.2)
        due = self.process.timeline.now + takes_s
        self.process.later(takes_s, self._step, due)

    def _step(self, due: float) -> None:
        """An inner step ends."""
        now = self.process.timeline.now
        if now < self.hung_until:
            self.process.later(self.hung_until - now, self._step, self.hung_until)
            return
        invariants.steps_keep_their_pace(now, max(due, self._thawed_at))
        tokens = self._random.randint(1, 4)
        self._model.train_on(tokens)
        core = self.core
        assert core is not None
        core.stepped(tokens)
        self._boundary()
        self._progress = Progress(core.inner_step, core.tokens, None, self._step_s)
        for link in self.links:
            link.stepped()
        if self.state == "failed":
            return
        if self._shards.have_stopped:
            self._leave(now + SETTLE_S)
        else:
            self._train_on()

    def thaw(self) -> None:
        self._thawed_at = self.process.timeline.now
        self.process.thaw()

    def _leave(self, until: float) -> None:
        """The budget is reached: let pushes settle, then say goodbye."""
        self.state = "leaving"
        if self.process.timeline.now < until and not all(link.settled for link in self.links):
            self.process.later(0.2, self._leave, until)
            return
        for link in self.links:
            self.process.spawn(link.leave(), "leave")
        self.process.later(1.5, self._end)

    def _end(self) -> None:
        self._note("done", self.process_id)
        self.state = "done"

    # ------------------------------------------------------------ a step boundary

    def _boundary(self) -> None:
        invariants.inbox_is_bounded(len(self._inbox), self._options.fragments, self._options.shards)
        while (event := self._inbox.pop()) is not None:
            self._handle(event)
            if self.state == "failed":
                return
            if isinstance(event, Arrived) and self.state == "training" and self._slow.random() < APPLIES_LAST:
                break  # applying took long: the rest waits for the next step
        if self.core is None:
            return
        for pending in self.core.snapshots():
            self._took(pending)
            self.links[self.core.manifest.fragments[pending.fragment_id].shard_index].push(pending)
        if self._touched:
            self._check_tokens(self.core)
            self._touched.clear()

    def _check_tokens(self, core: LearnerCore) -> None:
        for fragment_id in sorted(self._touched):
            fragment = core.fragments[fragment_id]
            if fragment.adopted:
                base = self._base(fragment)
                invariants.tokens_add_up(self._truth, self.process_id, fragment, base, gapless=self._carries)

    def _handle(self, event: Event) -> None:
        match event:
            case Arrived():
                self._arrived(event)
            case Asked() if self.core is None:
                self._early[event.directive.fragment_id] = event
            case Asked():
                self._core.collect(event.directive, event.epoch)
            case Answered():
                self._core.answered(event.fragment_id, event.round, event.answer)
                self._resolve(event.fragment_id)
            case Joined():
                self._joined(event)
            case Stopped():
                self._shards.stop(event.shard_index)
            case Failed():
                self.error = event.error
                self.state = "failed"
                self._note("failed", self.process_id, event.error.code)

    @property
    def _core(self) -> LearnerCore:
        assert self.core is not None
        return self.core

    def _joined(self, answer: Joined) -> None:
        """The first time that all shards gave a lease, the model is cut; then what is empty is seeded."""
        self._shards.join(answer)
        if self.core is not None:
            self._core.rejoined(answer.fragments, answer.epoch)
            for status in answer.fragments:
                self._resolve(status.fragment_id)
            self._seed(answer)
        elif self._shards.are_complete:
            manifest = _cut(tuple(self._replica.specs), answer.num_fragments, answer.num_shards)
            assert manifest.digest == answer.manifest_digest
            self.core = LearnerCore(self._replica, manifest, answer.policy)
            self._patterns = {i: self._arithmetic.pattern(f.fragment) for i, f in self.core.fragments.items()}
            for link in self.links:
                link.know(manifest)
            for shard in self._shards.joined:
                self._seed(shard)
            for asked in self._early.values():
                self.core.collect(asked.directive, asked.epoch)

    def _seed(self, answer: Joined) -> None:
        for status in answer.fragments:
            if not status.seeded:
                values = self._core.fragments[status.fragment_id].values()
                self.links[answer.shard_index].seed(status.fragment_id, values)

    def _arrived(self, event: Arrived) -> None:
        fragment = self._core.fragments[event.fragment_id]
        before = (fragment.epoch, fragment.version)
        if not self._core.arrived(
            event.fragment_id, event.version, event.epoch, event.values, event.merged_version,
            forgotten_version=event.forgotten_version,
        ):  # fmt: skip
            return
        self._note("applied", self.process_id, event.fragment_id, event.version, event.epoch)
        self._touched.add(event.fragment_id)
        invariants.anchors_are_published_values(self._truth, fragment)
        versions, p = self._truth.versions, event.fragment_id
        old, new = versions.get((p, before)), versions[p, (event.epoch, event.version)]
        if old is not None:
            invariants.anchors_grow(self._truth, old, new)
        base = self._base(fragment)
        self._resolve(p)
        if old is None or not new.descends_from(old):
            self._truth.entries[self.process_id, p] = (len(new.merged.get(self.process_id, ())), base)
        if self._counts_values:
            theta = self._arithmetic.theta(self._replica, fragment.fragment)
            tokens = fragment.tokens_since(self._core.tokens)
            invariants.progress_is_kept(self._truth, theta, fragment, self._patterns[event.fragment_id], tokens)

    # ------------------------------------------------------------ what the judge needs to know

    def _base(self, fragment: LearnerFragment) -> int:
        """Tokens that the learner counts as merged, of this fragment."""
        return self._core.tokens - fragment.tokens_since(self._core.tokens)

    def _took(self, pending: Pending) -> None:
        if pending.fragment_id in self.unresolved:
            return  # asked again for the same
        self._touched.add(pending.fragment_id)
        start = self._base(self._core.fragments[pending.fragment_id])
        origin = Origin(
            self.learner_id, self.process_id, pending.fragment_id, pending.round, pending.shard_epoch, start,
            start + pending.tokens, pending.delta(),
        )  # fmt: skip
        self.unresolved[pending.fragment_id] = origin
        self._origins[id(pending)] = (pending, origin)
        self._note("taken", self.process_id, pending.fragment_id, pending.round, start, origin.end)
        if self._counts_values:
            pattern = self._patterns[pending.fragment_id]
            invariants.contribution_is_what_was_trained(self._truth, origin, pending, pattern)

    def _encoded(self, pending: Pending, payload: Payload) -> None:
        self._truth.encoded(self._origins[id(pending)][1], payload)

    def _resolve(self, fragment_id: int) -> None:
        """If the pending contribution's fate was decided just now: is it the true one?"""
        origin = self.unresolved.get(fragment_id)
        core = self._core
        if origin is None or core.fragments[fragment_id].pending is not None:
            return
        del self.unresolved[fragment_id]
        self._touched.add(fragment_id)
        fates = core.contributions
        origin.belief = next((f for f in ("merged", "forgotten") if fates[f] > self._fates_seen[f]), "carried")
        self._fates_seen = fates.copy()
        self._note(origin.belief, self.process_id, fragment_id, origin.round, origin.epoch)
        self._truth.counts[f"learned that {origin.belief}"] += 1
        fragment = core.fragments[fragment_id]
        version = self._truth.versions[fragment_id, (fragment.epoch, fragment.version)]
        invariants.belief_is_true(self._truth, origin, version)
        if origin.belief == "forgotten":  # the learner's count goes on from there, whether it is in or not
            merged = version.merged.get(self.process_id, ())
            self._truth.entries[self.process_id, fragment_id] = (len(merged), self._base(fragment))
            if origin not in merged:
                self._truth.counts["tokens forgotten and lost"] += origin.end - origin.start
        if origin.belief != "carried" and core.policy.error_feedback:
            assert origin.payload is not None
            self._truth.residuals[self.process_id, fragment_id] = self._arithmetic.lost(origin.meant, origin.payload)
