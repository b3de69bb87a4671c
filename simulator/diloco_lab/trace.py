"""What the production cores decide in a run, recorded once and carried out many times.

Who contributes when, what a round merges, and when a version is applied depend on speeds, delays and settings, and not
on values, as long as all learners are healthy. So runs that differ by their seed, their rates or their outer step share
one trace. It is recorded with noise in the place of training (`recording.py`), and `replay.py` carries it out for all
of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from diloco_common.wire.manifest import Manifest


class Steps(NamedTuple):
    """These learners take an inner step, at this progress of the run."""

    learners: tuple[int, ...]
    fraction: float
    inner_steps: tuple[int, ...]
    """That each has taken before."""


class Snapshot(NamedTuple):
    """A learner takes and encodes a contribution."""

    learner: int
    fragment: int


class Merge(NamedTuple):
    """A shard makes a version."""

    fragment: int
    version: int
    weights: Mapping[int, float]
    """By learner: tokens^2 / steps."""


class Apply(NamedTuple):
    """A learner puts a version under its progress."""

    learner: int
    fragment: int
    version: int
    merged: bool
    """Whether its own contribution is in it."""
    steps: int
    """Inner steps since what it is counted from."""
    before: int
    """Those that led to the snapshot of a contribution that is not in it."""


class Adopt(NamedTuple):
    """A learner that joins takes a version as it is."""

    learner: int
    fragment: int
    version: int


class Carried(NamedTuple):
    """A contribution was not merged: it is as if it had not been taken."""

    learner: int
    fragment: int


class Begin(NamedTuple):
    """A learner is back, with new optimizer state."""

    learner: int


Event = Steps | Snapshot | Merge | Apply | Adopt | Carried | Begin


@dataclass(frozen=True)
class Trace:
    """A whole run."""

    manifest: Manifest
    events: tuple[Event, ...]
    outcome: Mapping[str, object]
    """As `lockstep.Outcome`."""
    is_healthy: bool
    """Nothing was refused: only then would other values lead to the same decisions."""
