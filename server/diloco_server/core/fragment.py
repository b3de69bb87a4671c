"""One fragment on its shard: its latest version, its open round, and who is in it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from diloco_common.manifest import Fragment
from diloco_common.messages import FragmentStatus, Held
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.membership import Member
from diloco_server.core.record import Record
from diloco_server.core.rounds import Contribution, Round

NORMS_MIN = 8
"""Merged contributions after which their median is trusted."""
NORM_QUIET = 1e-3
"""Share of the norm of version 0 below which a median says nothing. Embeddings that no learner has met hardly move, and
the first real contribution to them is thousands of times larger: 3199 times at 1 % of version 0 (docs/quality.md)."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A version that was kept, on its way back into a shard."""

    record: Record
    values: Values
    published: Published
    is_new_line: bool
    """Later versions were announced, or learners hold other bytes: it gets a name of its own, of the new epoch."""


@dataclass
class FragmentState:
    """What the shard knows of one of its fragments."""

    fragment: Fragment
    norms: deque[float]
    """Norms of the contributions merged last, for the running median."""
    seed_norm: float = 0.0
    """Norm of version 0: the yardstick until there is a median."""
    version: int = 0
    """Outer steps taken; grows within an epoch."""
    epoch: int = 0
    """That the version was made in."""
    before: tuple[int, int] | None = None
    """Epoch and version of the one that the published change leads from."""
    recovered: tuple[int, int] | None = None
    """Epoch and version that this life of the shard began with; None: it began with nothing."""
    seen_lost: int = 0
    """The latest version after the recovered one that a learner turned out to hold."""
    seeded: bool = False
    """Version 0 is there. Until then nothing can be pulled, and only a seed can be pushed."""
    computing: bool = False
    """A seed or a closed round is with the compute thread; the next version is not announced yet."""
    round: Round | None = None
    """The open round."""
    closed: Round | None = None
    """The round that the next version is being computed from."""
    rounds_opened: int = 0
    base_steps: dict[str, int] = field(default_factory=dict)
    """Learner -> inner step it had reported when the last round opened, for the cadence."""
    base_tokens: dict[str, int] = field(default_factory=dict)
    """Learner -> tokens it had reported then, for the end of the budget."""
    merged_versions: dict[str, int] = field(default_factory=dict)
    """Learner -> the last version that its contribution was merged into. Makes every merge visible exactly once."""
    merged_by: dict[str, str] = field(default_factory=dict)
    """Learner -> the process that contributed it: another one under the same id has nothing to do with it."""
    forgotten_version: int = 0
    """The latest version that held a contribution of somebody who is in `merged_versions` no longer. Grows."""
    tokens_merged: int = 0
    """Grows; never reset within an epoch."""
    values: Values | None = None
    published: Published | None = None
    """The announced version."""

    @property
    def identity(self) -> tuple[int, int]:
        """Epoch and version."""
        return self.epoch, self.version

    def restore(self, restored: Restored, epoch: int) -> None:
        """Go on from a version that was kept, in a life of the shard that has this epoch."""
        self.take(restored.record)
        self.recovered = self.identity
        if restored.is_new_line:
            self.epoch = epoch
        self.values, self.published, self.seeded = restored.values, restored.published, True

    def begin_seed(self, norm: float, tokens_merged: int) -> None:
        """The bytes of version 0 go to the compute thread."""
        self.computing = True
        self.seed_norm, self.tokens_merged = norm, tokens_merged

    def seed(self, values: Values, published: Published, epoch: int) -> None:
        """Version 0 is there."""
        self.values, self.published, self.epoch = values, published, epoch
        self.computing, self.seeded = False, True

    def open_round(self, live: Sequence[Member], now: float) -> Round:
        """Ask every live learner for a contribution to the next version."""
        self.round = Round(self.version + 1, now, {m.learner_id: m.generation for m in live})
        self.rounds_opened += 1
        self.base_steps = {m.learner_id: m.progress.inner_step for m in live}
        self.base_tokens = {m.learner_id: m.progress.tokens for m in live}
        return self.round

    def close_round(self, now: float) -> None:
        """What the open round has collected goes to the compute thread."""
        assert self.round is not None
        self.round.closed_at = now
        self.round, self.closed, self.computing = None, self.round, True

    def advance(self, record: Record, published: Published) -> None:
        """The next version is there."""
        self.closed, self.computing = None, False
        self.before = self.identity
        self.take(record)
        self.published = published

    def lacks(self, theirs: Held) -> bool:
        """Whether a learner holds a version that this life of the shard began without."""
        epoch, version = self.recovered or (None, 0)  # nothing came back: it begins anew, at version 0
        return theirs.version > version and (epoch is None or theirs.epoch >= epoch)

    def record(self) -> Record:
        """What is to be kept with the values."""
        return Record(
            self.fragment.fragment_id, self.epoch, self.version, dict(self.merged_versions), dict(self.merged_by),
            self.tokens_merged, tuple(self.norms), self.seed_norm, self.forgotten_version,
        )  # fmt: skip

    def take(self, record: Record) -> None:
        """Become what a record says."""
        self.epoch, self.version = record.epoch, record.version
        self.merged_versions, self.merged_by = dict(record.merged_versions), dict(record.merged_by)
        self.tokens_merged, self.seed_norm = record.tokens_merged, record.seed_norm
        self.norms = deque(record.norms, self.norms.maxlen)
        self.forgotten_version = record.forgotten_version

    def forget(self, learner_id: str) -> None:
        """Nobody comes back under this id for what was merged; if somebody does, it hears that this is not known."""
        self.forgotten_version = max(self.forgotten_version, self.merged_versions.pop(learner_id, 0))
        self.merged_by.pop(learner_id, None)

    def status(self, learner_id: str) -> FragmentStatus:
        """All that one learner is told of the fragment, at one moment."""
        merged = self.merged_versions.get(learner_id)
        return FragmentStatus(
            self.fragment.fragment_id, self.seeded, self.version, merged or 0, self.epoch,
            self.forgotten_version if merged is None else 0,
        )  # fmt: skip

    def held(self, learner_id: str, round_number: int) -> Contribution | None:
        """What the learner has contributed to this round, while that is open or being computed."""
        for collected in (self.round, self.closed):
            if collected is not None and collected.round == round_number:
                return collected.contributions.get(learner_id)
        return None

    def may_hold(self, learner_id: str, round_number: int) -> bool:
        """Whether what the learner contributed to this round is in a version, or may be."""
        return self.merged_versions.get(learner_id, self.forgotten_version) >= round_number

    def typical_norm(self) -> float:
        """Running median of merged norms, unless it is tiny; the norm of version 0 until there are enough of them."""
        if len(self.norms) >= NORMS_MIN:
            usual = median(self.norms)
            return max(usual, NORM_QUIET * self.seed_norm) if usual else 0.0
        return max(self.seed_norm, 0.01 * math.sqrt(self.fragment.num_elements))
