"""What a step boundary asks for: plain values, from the training thread to the network thread.

`StepBoundary` makes them in order. The connections carry out what is for shards (`Connections.perform`). The telemetry
writes all of them down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from diloco_common.wire.manifest import Manifest
from diloco_common.wire.messages import Progress
from diloco_worker.core.council_log import Fetch, FetchEnded
from diloco_worker.core.events import Answered, Failed, Joined
from diloco_worker.core.fragment import Fate, PendingContribution
from diloco_worker.core.tensors import FragmentTensors


@dataclass(frozen=True, slots=True)
class ModelCut:
    """The model is cut: fragments can be pulled and pushed now."""

    manifest: Manifest
    tensors: Mapping[int, FragmentTensors]
    """By fragment, for the codec thread."""


@dataclass(frozen=True, slots=True)
class PushContribution:
    """A round asks for this contribution."""

    contribution: PendingContribution
    cpu_seconds: float = 0.0
    """Of the training thread, for the snapshot."""


@dataclass(frozen=True, slots=True)
class OfferSeed:
    """The shard has nothing of this fragment: offer it these values."""

    fragment_id: int
    values: Tensor
    hold_s: float
    """Others may know better: offer them after so many seconds, if nobody else has."""


@dataclass(frozen=True, slots=True)
class VersionApplied:
    """A version is in the model."""

    fragment_id: int
    version: int
    epoch: int
    values: Tensor
    """The new anchor."""
    contribution: PendingContribution | None
    """The one whose fate the version tells."""
    fate: Fate | None
    since: int
    """The learner's count of tokens where the work begins that no version holds, as far as it knows."""
    seconds: float
    cpu_seconds: float
    replaced: object
    """Freed with the act, in the network thread: giving so much memory back can take longer than the apply did."""


@dataclass(frozen=True, slots=True)
class WorkCarried:
    """A contribution was not merged: its work goes into the next one."""

    contribution: PendingContribution


@dataclass(frozen=True, slots=True)
class StepEnded:
    """An inner step is over, and what it meant for the training loop."""

    progress: Progress
    tokens: int
    """Of this step."""
    step_s: float
    """From the end of the step before."""
    stall_s: float
    """How long `step` held the training loop, in seconds."""


@dataclass(frozen=True, slots=True)
class LastRounds:
    """The learner leaves, and asks for a round of each of these fragments."""

    fragment_ids: frozenset[int]


Act = (
    ModelCut | PushContribution | OfferSeed | VersionApplied | WorkCarried | StepEnded | LastRounds | Fetch
    | FetchEnded | Answered | Joined | Failed
)  # fmt: skip
"""Of what came: a push has its outcome; all ranks have a lease; the learner cannot go on, and that comes last."""


@dataclass(frozen=True, slots=True)
class Figures:
    """How far a learner is."""

    inner_step: int = 0
    tokens: int = 0
    contributions: Mapping[str, int] | None = None
    """As in `LearnerCore`; None: the model is not cut yet."""
    tokens_carried: float = 0.0
    """Averaged over fragments."""
    unmerged: int = 0
    """Contributions under way whose fate is not known."""
    tokens_unmerged: float = 0.0
    """As in `LearnerCore`."""
    versions_undone: int = 0
    """Versions that inner steps seem to have taken back."""
