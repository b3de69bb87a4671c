"""One fragment on its shard: its latest version, its open round, and the arithmetic that makes the next version."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from diloco_common.codec import Payload, decode_payload, encode_payload
from diloco_common.codec.change import encode_change, pull_encodings
from diloco_common.manifest import Fragment
from diloco_common.messages import FragmentStatus
from diloco_server.core.merge import merge
from diloco_server.core.outer import OuterOptimizer
from diloco_server.core.rounds import Contribution, Round

NORMS_MIN = 8
"""Merged contributions after which their median is trusted."""
NORM_QUIET = 1e-3
"""Share of the norm of version 0 below which a median says nothing. Embeddings that no learner has met hardly move, and
the first real contribution to them is thousands of times larger: 3199 times at 1 % of version 0 (docs/quality.md)."""


@dataclass
class Values:
    """The numbers of a fragment: changed only by `seed` and `step`, on the shard's compute thread."""

    theta: Tensor
    """float32 [num_elements]."""
    buffers: list[Tensor]
    """State of the outer optimizer, float32 [num_elements] each."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version as it is sent: encoded once, the same bytes for all."""

    values: Payload
    """What every learner that has this version holds as its anchor."""
    change: Payload | None = None
    """Leads there from the version before; None for a first version, and where `sync.pull` sends values."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a version says about how it came to be. Kept with it, so that a shard can go on from it."""

    fragment_id: int
    epoch: int
    """That the version was made in: (epoch, version) names the same bytes for ever."""
    version: int
    merged_versions: dict[str, int]
    """Learner -> the last version that its contribution was merged into, this one included."""
    merged_by: dict[str, str]
    """Learner -> the process that contributed it."""
    tokens_merged: int
    norms: tuple[float, ...]
    """Of the contributions merged last, oldest first."""
    seed_norm: float
    forgotten_version: int = 0
    """The latest version that held a contribution of a learner that is in `merged_versions` no longer."""


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


def seed(payload: Payload, optimizer: OuterOptimizer) -> Values:
    """The values of version 0. Raises BadEncoding."""
    theta = torch.empty(payload.header.num_elements)
    decode_payload(payload, theta)
    return Values(theta, [torch.zeros_like(theta) for _ in range(optimizer.num_buffers)])


def step(
    values: Values,
    fragment: Fragment,
    contributions: Sequence[Contribution],
    *,
    outer_step: int,
    rule: str,
    optimizer: OuterOptimizer,
) -> None:
    """Merge a closed round and take one outer step, in place."""
    for merged in merge(contributions, fragment.pieces, rule):
        part = merged.bounds
        optimizer.step_merged(values.theta[part], merged, [b[part] for b in values.buffers], outer_step)


def publish(values: Values, encoding: str, before: Published | None = None) -> Published:
    """Encode the current values for learners, who hold `before` (None: nothing, or another epoch's)."""
    whole = pull_encodings(encoding)[-1]
    if before is None or encoding == whole:
        return Published(encode_payload(values.theta, whole))
    change, anchor = encode_change(values.theta, before.values, encoding)
    return Published(anchor, change)
