"""A fragment as one number: the tokens in it. It behaves as the tensor that a learner's core would have there.

What is lossy in production loses here as well: values are rounded to a `GRID` that whole tokens do not lie on, and
whose multiples, and their differences from whole numbers, binary floating point adds exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch

from diloco_common.codec import Payload
from diloco_common.codec.change import VALUES
from diloco_common.codec.payload import CHUNK_ELEMENTS, PayloadHeader, num_payload_bytes
from diloco_common.manifest import Fragment, TensorSpec
from diloco_server.core.arithmetic import Published

GRID = 0.375
EXACT = "float32"


@cache
def _payload_bytes(encoding: str) -> int:
    return num_payload_bytes(encoding, 1)


class Number:
    """One element, changed in place as a tensor is."""

    __slots__ = ("value",)
    device = torch.device("cpu")
    is_cuda = False

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def clone(self) -> Number:
        return Number(self.value)

    def add_(self, other: Number) -> Number:
        self.value += other.value
        return self


class AsTorch:
    """What a learner's core uses of torch."""

    @staticmethod
    def empty(num_elements: int, device: torch.device | None = None) -> Number:
        return Number()

    @staticmethod
    def empty_like(other: Number) -> Number:
        return Number()

    @staticmethod
    def add(a: Number, b: Number) -> Number:
        return Number(a.value + b.value)

    @staticmethod
    def sub(a: Number, b: Number) -> Number:
        return Number(a.value - b.value)


class NumberReplica:
    """A model and its `Replica` in one: all fragments train on every token."""

    device = Number.device

    def __init__(self, num_fragments: int, start: float) -> None:
        self.specs = specs(num_fragments)
        self._start = start
        self._thetas: dict[int, Number] = {}

    def theta(self, fragment: Fragment) -> Number:
        return self._thetas.setdefault(fragment.fragment_id, Number(self._start))

    def train_on(self, tokens: int) -> None:
        self._start += tokens
        for theta in self._thetas.values():
            theta.value += tokens

    def read(self, fragment: Fragment, out: Number) -> None:
        out.value = self.theta(fragment).value

    def write(self, fragment: Fragment, values: Number) -> None:
        self.theta(fragment).value = values.value

    def add(self, fragment: Fragment, difference: Number) -> None:
        self.theta(fragment).value += difference.value

    def blend(self, fragment: Fragment, new: Number, alpha: float) -> None:
        theta = self.theta(fragment)
        theta.value = new.value + alpha * (theta.value - new.value)


@cache
def specs(num_fragments: int) -> tuple[TensorSpec, ...]:
    """A model of as many tensors, of one element each: then each is a fragment."""
    return tuple(TensorSpec(f"fragment{i}", (1,), mean_merge=False) for i in range(num_fragments))


def payload(value: float, encoding: str) -> Payload:
    """Has the sizes of a real one, a checksum that tells values apart, and the value itself in place of bytes."""
    header = PayloadHeader(encoding, 1, CHUNK_ELEMENTS, _payload_bytes(encoding), hash(value) & 0xFFFFFFFF)
    return Payload(header, cast(Any, (value,)))


def carried(payload: Payload) -> float:
    """The value that a payload holds."""
    return cast(Any, payload.chunks[0])  # type: ignore[no-any-return]


def encode_payload(
    values: Number,
    encoding: str,
    *,
    minus: Number | None = None,
    plus: Number | None = None,
    loss: Number | None = None,
) -> Payload:
    """As `diloco_common.codec.encode_payload`."""
    meant = values.value - (minus.value if minus is not None else 0.0) + (plus.value if plus is not None else 0.0)
    decoded = _encoded(meant, encoding)
    if loss is not None:
        loss.value = meant - decoded
    return payload(decoded, encoding)


def publish(theta: float, encoding: str, before: Published | None) -> Published:
    """As `diloco_server.core.arithmetic.publish`."""
    if encoding in VALUES:
        return Published(payload(_encoded(theta, encoding), encoding))
    if before is None:
        return Published(payload(_encoded(theta, VALUES[1]), VALUES[1]))
    anchor = carried(before.values)
    change = _encoded(theta - anchor, encoding)
    return Published(payload(anchor + change, VALUES[1]), payload(change, encoding))


def merged(weighted: Sequence[tuple[float, float]], rule: str) -> float:
    """Of (weight, value): their weighted mean; with "rda" its direction, and the weighted mean of their lengths."""
    total = sum(weight for weight, _ in weighted)
    if rule == "rda":
        direction = sum(weight * ((value > 0) - (value < 0)) for weight, value in weighted)
        if direction:
            radius = sum(weight * abs(value) for weight, value in weighted) / total
            return radius if direction > 0 else -radius
    return sum(weight * value for weight, value in weighted) / total


def _encoded(value: float, encoding: str) -> float:
    """What is left of a value."""
    return value if encoding == EXACT else round(value / GRID) * GRID
