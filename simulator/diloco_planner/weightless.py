"""Shard and learner cores whose tensors hold no values: they decide only by times, sizes, steps and tokens.

The manifest has the true sizes. Values are one shared empty tensor, and payloads have headers but no bytes.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from diloco_common.codec import Payload, PayloadHeader, num_payload_bytes
from diloco_common.codec.payload import usual_chunk_elements
from diloco_common.settings import Settings
from diloco_common.wire.manifest import Manifest, TensorSpec, cut
from diloco_common.wire.messages import LearnerPolicy, PushHeader
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.fragment import Restored
from diloco_server.core.record import empty_record
from diloco_server.core.shard import Shard
from diloco_worker.core.fragment import PendingContribution
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.tensors import FragmentTensors

NOTHING = torch.empty(0)
NO_BYTES = cast(Payload, None)
"""The cores pass payloads on, and look only at the headers."""
PUBLISHED = Published(NO_BYTES)


def manifest_of(elements: int, fragments: int) -> Manifest:
    """A model of equal fragments."""
    return cut([TensorSpec(f"p{i:04}", (elements,)) for i in range(fragments)], fragments, 1)


def seeded_shard(settings: Settings, manifest: Manifest) -> Shard:
    """A shard with version 0 of everything."""
    shard = Shard(settings, 1)
    records = [empty_record(f.fragment_id) for f in manifest.owned_by(settings.shard.index)]
    shard.versions.restore(manifest, [Restored(record, Values(NOTHING, []), PUBLISHED, True) for record in records])
    return shard


class _Contributed:
    """Replaces `ContributionTensors`."""

    snapshot = NOTHING


class WeightlessTensors:
    """Replaces `FragmentTensors`. All results are there at once, as nothing is computed."""

    def __init__(self) -> None:
        self.anchor: torch.Tensor | None = None

    def contribute(self, round_number: int) -> _Contributed:
        return _Contributed()

    def adopt(self, values: torch.Tensor) -> None:
        self.anchor = values

    def begin_with_own(self) -> None:
        self.anchor = NOTHING

    def give_back(self) -> None: ...

    def carry(self, values: torch.Tensor, **_: Any) -> None: ...


class _WeightlessReplica:
    """Replaces the user's model."""

    def held(self, fragment: Any) -> Any:
        return fragment


def learner_core(manifest: Manifest, policy: LearnerPolicy) -> LearnerCore:
    """The production core with replaced tensors."""
    core = LearnerCore(cast(Any, _WeightlessReplica()), manifest, policy)
    for fragment in core.fragments.values():
        fragment.tensors = cast(FragmentTensors, WeightlessTensors())
    return core


def advance(core: LearnerCore, inner_step: int, tokens: int) -> None:
    """The same as this many calls of `LearnerCore.stepped`."""
    core.inner_step, core.tokens = inner_step, tokens


class Headers:
    """Makes headers of pushes, with true sizes, and a different checksum for each contribution."""

    def __init__(self, manifest: Manifest, encoding: str) -> None:
        self._digest, self._encoding, self._made = manifest.digest, encoding, 0
        self.num_bytes = num_payload_bytes(encoding, manifest.fragments[0].num_elements)
        self._chunk = usual_chunk_elements(encoding)

    def of(self, contribution: PendingContribution, num_elements: int) -> tuple[PushHeader, tuple[float, ...]]:
        """The header, and the norms of its pieces: those of a random walk of as many steps."""
        self._made = (self._made + 1) % 2**32
        payload = PayloadHeader(self._encoding, num_elements, self._chunk, self.num_bytes, self._made)
        header = PushHeader(
            contribution.fragment_id, contribution.round, contribution.epoch, contribution.base_version,
            contribution.tokens, contribution.steps, payload, self._digest,
        )  # fmt: skip
        return header, (1e-3 * math.sqrt(num_elements * contribution.steps),)
