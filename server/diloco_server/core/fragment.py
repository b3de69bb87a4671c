"""One fragment on its shard: its phase, its latest version, and the round that makes the next one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from torch import Tensor

from diloco_common.errors import Busy
from diloco_common.wire.manifest import Fragment
from diloco_common.wire.messages import Collect, Committed, FragmentStatus, Held, PushAnswer, PushHeader, VersionId
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.arrivals import Arrivals, Expected, RoundRequest, next_boundary
from diloco_server.core.influence import Influence
from diloco_server.core.membership import Member
from diloco_server.core.merge import Latest
from diloco_server.core.parts import HalfContribution
from diloco_server.core.record import Record, empty_record
from diloco_server.core.round import Contribution, Round

KEPT_MAX = 4
"""Maximum number of earlier versions of a fragment that are kept while ranks pull them."""
DECLINED_MAX = 8
"""Maximum number of answers about one round that are remembered per learner."""


class Phase(Enum):
    UNSEEDED = "unseeded"  # there is no version; only a seed can be pushed, and nothing can be pulled
    SEEDING = "seeding"  # version 0 is being computed and made durable
    RESTING = "resting"  # the latest version is announced, and no round is open
    COLLECTING = "collecting"  # the latest version is announced, and a round is open
    MERGING = "merging"  # the next version is being computed from a closed round and made durable


class Phases:
    """Indexes a shard's fragments by phase, because visiting all of them takes long."""

    def __init__(self) -> None:
        self.collecting: dict[int, FragmentState] = {}
        self.changed: set[int] = set()
        """Fragments whose phase changed; the reader empties it."""

    def entered(self, state: FragmentState) -> None:
        fragment_id = state.fragment.fragment_id
        self.changed.add(fragment_id)
        if state.phase is Phase.COLLECTING:
            self.collecting[fragment_id] = state
        else:
            self.collecting.pop(fragment_id, None)


@dataclass(frozen=True, slots=True)
class Restored:
    record: Record
    values: Values
    published: Published
    is_new_line: bool
    """Later versions were announced, or learners hold other bytes, so the version is renamed into the new epoch."""


@dataclass
class HalfSeed:
    learner_id: str
    parts: HalfContribution
    grown_at: float


@dataclass
class FragmentState:
    fragment: Fragment
    record: Record
    """The record of the latest announced version; this state owns its dicts. The version grows within an epoch."""
    phase: Phase = Phase.UNSEEDED
    """Only the transitions below change it."""
    phases: Phases = field(default_factory=Phases, repr=False, kw_only=True)
    collected: Round | None = None
    """The open round while COLLECTING, the closed one while MERGING, else None."""
    before: VersionId | None = None
    """The version that the published change starts from."""
    kept: dict[VersionId, tuple[Record, Published]] = field(default_factory=dict)
    """Earlier versions that ranks are pulling, oldest first: all ranks of a learner must get the same version."""
    pulled: dict[str, VersionId] = field(default_factory=dict)
    """Learner -> the version that its ranks last requested under its lease."""
    recovered: VersionId | None = None
    """The version restored when this epoch began; None: no version was restored."""
    recovered_tokens: int = 0
    """Tokens merged into the recovered version."""
    seen_lost: int = 0
    """The latest version after the recovered one that any learner has proved that it holds."""
    last_request: RoundRequest = field(default_factory=lambda: RoundRequest(0, {}), repr=False)
    """The request of this epoch's last round, open or not; of round 0: it has had none."""
    base_steps: dict[str, int] = field(default_factory=dict)
    """Learner -> the inner step it had reported when the last round opened."""
    base_tokens: dict[str, int] = field(default_factory=dict)
    """Learner -> the tokens it had reported when a round last asked it."""
    declined: dict[str, dict[PushHeader, PushAnswer]] = field(default_factory=dict)
    """Learner -> its refused or late contributions to the next version, and the answers. The learner carries that work,
    so no copy of them may be taken, even if the same round opens again."""
    latest: Latest = field(default_factory=Latest, repr=False)
    """For buffers: each learner's last contribution, which counts in rounds without it."""
    half_seed: HalfSeed | None = None
    """While UNSEEDED: the parts of version 0 received so far, if a learner sends it in parts."""
    seeded_at: float = -math.inf
    """When a learner last seeded the fragment in this epoch."""
    seen: int = 0
    """Tokens merged into the newest version that the seeding learner had seen."""
    may_bring: dict[str, int] = field(default_factory=dict)
    """Learner -> its `seen`. These have seen more tokens than this fragment has merged, and may replace its values."""
    seeding: Record | None = None
    """While SEEDING: the record of the version that the seed becomes."""
    values: Values | None = None
    """Values of the announced version; while MERGING, of the next one."""
    said: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """Learner -> a sample of its contribution to the last compared round (`influence.py`)."""
    published: Published | None = None
    """The announced version."""

    @classmethod
    def unseeded(cls, fragment: Fragment, phases: Phases) -> FragmentState:
        return cls(fragment, empty_record(fragment.fragment_id), phases=phases)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.phases.entered(self)

    # ------------------------------------------------------------ transitions

    def restore(self, restored: Restored, epoch: int) -> None:
        """UNSEEDED -> RESTING: continue from a stored version in this new epoch."""
        assert self.phase is Phase.UNSEEDED
        self.record, self.recovered = restored.record.copy(), restored.record.version_id
        self.recovered_tokens = restored.record.tokens_merged
        if restored.is_new_line:
            self.rename(epoch)
        self.values, self.published = restored.values, restored.published
        self._enter(Phase.RESTING)

    def begin_seed(self, learner_id: str, tokens_merged: int, now: float) -> None:
        """UNSEEDED -> SEEDING: the seed goes to the compute thread as version 0.

        RESTING, COLLECTING -> SEEDING: it becomes the next version and replaces all values.
        """
        assert self.phase is Phase.UNSEEDED or (self.seeded and not self.computing and learner_id in self.may_bring)
        record = empty_record(self.fragment.fragment_id)
        if self.seeded:
            record = replace(record, version=self.version + 1, forgotten_version=self.version + 1)
        self.seeding = replace(record, tokens_merged=tokens_merged)
        self.half_seed, self.collected = None, None
        self.seeded_at, self.seen = now, self.may_bring.pop(learner_id, tokens_merged)
        self._enter(Phase.SEEDING)

    def fail_seed(self) -> None:
        """SEEDING -> UNSEEDED, or back to RESTING: the seed was unusable."""
        assert self.phase is Phase.SEEDING
        self.seeding = None
        self._enter(Phase.UNSEEDED if self.published is None else Phase.RESTING)

    def seed(self, record: Record, values: Values, published: Published) -> None:
        """SEEDING -> RESTING: version 0, or the version that replaces the old values, is durable."""
        assert self.phase is Phase.SEEDING
        self.record, self.values, self.published = record.copy(), values, published
        self.seeding, self.before = None, None
        self.kept.clear()
        self.declined.clear()
        self.may_bring = {i: seen for i, seen in self.may_bring.items() if seen > self.seen}
        self._enter(Phase.RESTING)

    def open_round(
        self, asked: Sequence[Member], steps: Mapping[str, int], beside: Collection[str], patience_s: float, now: float
    ) -> Round:
        """RESTING -> COLLECTING: ask these learners for contributions to the next version. `steps`: inner steps
        reported by all live learners. `beside`: learners whose contributions are not merged."""
        assert self.phase is Phase.RESTING
        generations = {m.learner_id: m.generation for m in asked}
        left_out = frozenset(generations.keys() & beside)
        self.collected = Round(
            self.version + 1, now, generations, beside=left_out if len(left_out) < len(asked) else frozenset()
        )
        self.last_request = RoundRequest(self.collected.round, _expected(asked, patience_s, now))
        self.base_steps = dict(steps)
        self.base_tokens |= {m.learner_id: m.reported.tokens for m in asked}
        self._enter(Phase.COLLECTING)
        return self.collected

    def ask_again(self, live: Sequence[Member], beside: Collection[str], patience_s: float, now: float) -> list[Member]:
        """COLLECTING: also ask learners that were refused or have joined since. Returns them. `beside`: as before."""
        assert self.round is not None
        self.round.asked_at = now
        again = [m for m in live if self.round.ask_again(m.learner_id, m.generation)]
        ids = {m.learner_id for m in again}
        self.round.beside = self.round.beside - ids | ids.intersection(beside)
        self.base_steps |= {m.learner_id: m.reported.inner_step for m in again}
        self.base_tokens |= {m.learner_id: m.reported.tokens for m in again}
        self.last_request.expected |= _expected(again, patience_s, now)
        return again

    def abandon_round(self) -> None:
        """COLLECTING -> RESTING: no contribution will come, so the same round opens again later; or the run is over."""
        assert self.round is not None
        self.collected = None
        self._enter(Phase.RESTING)

    def close_round(self, influence: Influence, now: float) -> Round:
        """COLLECTING -> MERGING: bound the collected contributions and close the round."""
        assert self.round is not None
        assert self.round.contributions
        part, _ = self.round.parted()
        if not self.fragment.traits.is_whole:
            bounded, self.round.limit = influence.bound(self.fragment.fragment_id, part, self.record.limit)
        else:
            bounded = influence.bound_weights(part)
        self.round.contributions |= bounded
        self.round.closed_at = now
        self._enter(Phase.MERGING)
        assert self.closed is not None
        return self.closed

    def advance(self, record: Record, published: Published) -> None:
        """MERGING -> RESTING: the next version is durable."""
        assert self.closed is not None
        assert record.version == self.closed.round == self.version + 1
        self.before = self.version_id
        if self.published is not None:
            self.kept[self.version_id] = self.record, self.published
        self.drop_unwanted()
        self.record, self.published = record.copy(), published
        self.collected = None
        self._enter(Phase.RESTING)
        self.declined.clear()

    def mirror(self, record: Record, published: Published) -> None:
        """Any -> RESTING: the mirrored shard announced a version. The previous one stays for learners that know it."""
        self.kept = {} if self.published is None else {self.version_id: (self.record, self.published)}
        self.before = None if published.change is None else self.version_id
        self.record, self.published = record, published
        self._enter(Phase.RESTING)

    # ------------------------------------------------------------ changes in every phase

    def rename(self, epoch: int) -> None:
        """Give the latest version a new name: its old name may also name bytes that were lost."""
        self.record, self.before = replace(self.record, epoch=epoch), None
        self.kept.clear()

    def decline(self, learner_id: str, header: PushHeader, answer: PushAnswer) -> None:
        """Remember that a contribution was not taken, for as long as its round may open again."""
        if header.round != self.version + 1:
            return
        answers = self.declined.setdefault(learner_id, {})
        answers[header] = answer
        if len(answers) > DECLINED_MAX:
            del answers[next(iter(answers))]  # the oldest

    def forget(self, learner_id: str) -> None:
        """Forget a learner's merges. A process that asks with its id hears that they are unknown."""
        merged = self.record.merged_versions.pop(learner_id, 0)
        self.record.merged_by.pop(learner_id, None)
        self.declined.pop(learner_id, None)
        self.kept.clear()  # they name the merges too
        self.record = replace(self.record, forgotten_version=max(self.record.forgotten_version, merged))

    # ------------------------------------------------------------ questions

    @property
    def version(self) -> int:
        return self.record.version

    @property
    def epoch(self) -> int:
        """The epoch in which the version was made."""
        return self.record.epoch

    @property
    def version_id(self) -> VersionId:
        return self.record.version_id

    @property
    def tokens_merged(self) -> int:
        return self.record.tokens_merged

    @property
    def seeded(self) -> bool:
        return self.phase not in (Phase.UNSEEDED, Phase.SEEDING)

    @property
    def computing(self) -> bool:
        return self.phase in (Phase.SEEDING, Phase.MERGING)

    @property
    def round(self) -> Round | None:
        return self.collected if self.phase is Phase.COLLECTING else None

    @property
    def closed(self) -> Round | None:
        """The closed round from which the next version is computed."""
        return self.collected if self.phase is Phase.MERGING else None

    def announcement(self) -> Committed:
        return Committed(self.fragment.fragment_id, self.version, self.epoch)

    def request(self) -> Collect:
        return Collect(self.fragment.fragment_id, self.version + 1, self.epoch)

    def status(self, learner_id: str) -> FragmentStatus:
        return status_of(self.record, learner_id, seeded=self.seeded and learner_id not in self.may_bring)

    def named(self, want: VersionId) -> tuple[Record, Published] | None:
        if self.published is not None and want == self.version_id:
            return self.record, self.published
        return self.kept.get(want)

    def drop_unwanted(self) -> None:
        """Drop earlier versions that no rank is pulling, and all but the newest few."""
        wanted = set(self.pulled.values())
        kept = [(name, held) for name, held in self.kept.items() if name in wanted]
        self.kept = dict(kept[-KEPT_MAX:])

    def lacks(self, theirs: Held) -> bool:
        """Whether a learner holds a version that was lost before this epoch."""
        if self.recovered is None:  # the fragment starts again from version 0
            return theirs.version > 0
        return theirs.version > self.recovered.version and theirs.epoch >= self.recovered.epoch

    def is_beside(self, theirs: Held) -> bool:
        """Whether a learner continued from an earlier version, in a later epoch than the restored version's. This
        happens when a promoted standby lacked versions that this shard had."""
        recovered = self.recovered
        return recovered is not None and theirs.epoch > recovered.epoch and theirs.version < recovered.version

    def knows_less(self, tokens_seen: int, since: float) -> bool:
        """Whether the fragment was seeded from nothing in this epoch, after `since`, by a learner that had seen fewer
        tokens."""
        has_begun = self.phase is not Phase.UNSEEDED and self.recovered is None and self.seeded_at >= since
        return has_begun and tokens_seen > max(self.seen, self.tokens_merged)

    def held(self, learner_id: str, round_number: int) -> Contribution | None:
        """The learner's contribution to this round, while the round is open or being merged."""
        if self.collected is not None and self.collected.round == round_number:
            return self.collected.contributions.get(learner_id)
        return None

    def answered(self, learner_id: str, header: PushHeader) -> PushAnswer | None:
        """The answer that an earlier copy of this contribution got, if it was not taken."""
        return self.declined.get(learner_id, {}).get(header)

    def half_seed_of(self, learner_id: str, quiet_since: float) -> HalfSeed | None:
        """The parts of version 0 that this learner has sent.

        Raises Busy if another learner is sending them and sent one after `quiet_since`; otherwise they may be replaced.
        """
        half = self.half_seed
        if half is None or half.learner_id == learner_id:
            return half
        if half.grown_at <= quiet_since:
            return None
        raise Busy(f"fragment {self.fragment.fragment_id}: {half.learner_id} is sending version 0 in parts")

    def drop_half_seed(self, learner_id: str) -> None:
        """Drop this learner's parts of version 0, which will not be completed."""
        if self.half_seed is not None and self.half_seed.learner_id == learner_id:
            self.half_seed = None

    def may_hold(self, learner_id: str, round_number: int) -> bool:
        """Whether the learner's contribution to this round is in a version, or may be."""
        return self.record.merged_versions.get(learner_id, self.record.forgotten_version) >= round_number


def _expected(asked: Iterable[Member], patience_s: float, now: float) -> dict[Arrivals, Expected]:
    return {m.arrivals: Expected(next_boundary(m.reports, patience_s, now)) for m in asked}


def status_of(record: Record, learner_id: str, *, seeded: bool = True) -> FragmentStatus:
    merged = record.merged_versions.get(learner_id)
    return FragmentStatus(
        record.fragment_id, seeded, record.version, merged or 0, record.epoch,
        record.forgotten_version if merged is None else 0,
    )  # fmt: skip
