"""The arithmetic that makes the next version of a fragment, and the bytes that are sent of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from diloco_common.codec import Payload, decode_payload, encode_payload, memory
from diloco_common.codec.change import encode_change, pull_encodings
from diloco_common.wire.manifest import Fragment
from diloco_server.core.merge import MergeRule, merge, pool
from diloco_server.core.outer import OuterOptimizer
from diloco_server.core.parts import PartedPayload
from diloco_server.core.round import Contribution


@dataclass(frozen=True, slots=True)
class Making:
    """How versions of a fragment are made."""

    rule: str | MergeRule
    optimizer: OuterOptimizer


@dataclass
class Values:
    """The numbers of a fragment. Only `seed` and `step` change them, on the shard's compute thread."""

    theta: Tensor
    """float32 [num_elements]."""
    buffers: list[Tensor]
    """State of the outer optimizer, [num_elements] each, in the dtype that it keeps."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version as it is sent: encoded once, the same bytes for everybody."""

    values: Payload
    """The anchor of every learner that has this version."""
    change: Payload | None = None
    """The difference to the version before. None for a first version, and if `sync.pull` sends values."""


def seed(payload: Payload | PartedPayload, optimizer: OuterOptimizer) -> Values:
    """The values of version 0. Raises BadEncoding."""
    num_elements = payload.header.num_elements
    theta = memory.empty(num_elements)
    if isinstance(payload, PartedPayload):
        for part in payload.parts:
            some = memory.empty(part.payload.header.num_elements)
            decode_payload(part.payload, some)
            for start, stop, shift in part.spans:
                theta[start:stop] = some[start + shift : stop + shift]
    else:
        decode_payload(payload, theta)
    return Values(theta, optimizer.new_buffers(num_elements))


def step(
    values: Values,
    fragment: Fragment,
    contributions: Sequence[Contribution],
    *,
    outer_step: int,
    making: Making,
) -> None:
    """Merge a closed round and take one outer step, in place. What is contributed whole is merged whole."""
    if fragment.traits.is_whole:
        for bounds, merged_values in pool(contributions, fragment.pieces):
            values.theta[bounds] = merged_values
        return
    for merged in merge(contributions, fragment.pieces, making.rule):
        part = merged.bounds
        making.optimizer.step_merged(values.theta[part], merged, [b[part] for b in values.buffers], outer_step)


def publish(values: Values, encoding: str, before: Published | None = None) -> Published:
    """Encode the current values for learners that hold `before`. None: they hold nothing, or another epoch's."""
    whole = pull_encodings(encoding)[-1]
    if before is None or encoding == whole:
        return Published(encode_payload(values.theta, whole))
    change, anchor = encode_change(values.theta, before.values, encoding)
    return Published(anchor, change)
