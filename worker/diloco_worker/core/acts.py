"""Acts: the requests and results of a step boundary, plain values from the training thread to the network thread.

`StepBoundary` makes them in order. `Connections.perform` carries out those for shards; the telemetry records all.
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
    manifest: Manifest
    tensors: Mapping[int, FragmentTensors]
    """Fragment -> tensors, for the codec thread."""


@dataclass(frozen=True, slots=True)
class PushContribution:
    """Push this contribution: a round asks for it."""

    contribution: PendingContribution
    cpu_seconds: float = 0.0
    """CPU time of the training thread for the snapshot."""


@dataclass(frozen=True, slots=True)
class OfferSeed:
    """Offer these values to the shard, which has no version of this fragment."""

    fragment_id: int
    values: Tensor
    hold_s: float
    """Seconds to wait first: another learner may have better values."""


@dataclass(frozen=True, slots=True)
class VersionApplied:
    fragment_id: int
    version: int
    epoch: int
    values: Tensor
    contribution: PendingContribution | None
    """The contribution whose fate this version decides."""
    fate: Fate | None
    since: int
    """The learner's token count at which the work begins that no version holds, as far as it knows."""
    seconds: float
    cpu_seconds: float
    replaced: object
    """Freed with the act in the network thread: giving back so much memory can take longer than applying a version."""


@dataclass(frozen=True, slots=True)
class WorkCarried:
    contribution: PendingContribution


@dataclass(frozen=True, slots=True)
class StepEnded:
    """An inner step ended; with its cost for the training loop."""

    progress: Progress
    tokens: int
    step_s: float
    """Seconds since the end of the previous step."""
    stall_s: float
    """Seconds that `step` held up the training loop."""


@dataclass(frozen=True, slots=True)
class LastRounds:
    """The learner leaves and asks for a last round of each of these fragments."""

    fragment_ids: frozenset[int]


Act = (
    ModelCut | PushContribution | OfferSeed | VersionApplied | WorkCarried | StepEnded | LastRounds | Fetch
    | FetchEnded | Answered | Joined | Failed
)  # fmt: skip
"""`Answered`: a push has its outcome. `Joined`: all ranks have a lease. `Failed`: the learner cannot go on."""


@dataclass(frozen=True, slots=True)
class Figures:
    inner_step: int = 0
    tokens: int = 0
    contributions: Mapping[str, int] | None = None
    """As in `LearnerCore`; None: the model is not cut yet."""
    tokens_carried: float = 0.0
    unmerged: int = 0
    tokens_unmerged: float = 0.0
    """As in `LearnerCore`."""
    versions_undone: int = 0
    """Versions that inner steps seem to have undone."""
