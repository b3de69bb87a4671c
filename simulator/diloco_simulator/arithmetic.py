"""What the values of a simulated model are: tensors, as in production, or one number per fragment.

The promises are about ids, versions and tokens, and most of a schedule's time would go into arithmetic on 23 elements.
So most short schedules count: a fragment is the number of tokens in it, and a payload carries that number. What decides
stays production code; in `LearnerFragment` and `Pending` only the names `torch` and `encode_payload` stand for numbers,
and in the store what a file holds (`number_file.py`), while such a schedule runs. Encodings still lose something, on a
grid on which sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, Protocol

import torch

import diloco_server.storage.store as storage
import diloco_worker.core.fragment as learner_fragment
from diloco_common.codec import Payload, decode_payload, encode_payload
from diloco_common.codec.change import decode_version
from diloco_common.manifest import Fragment, Piece
from diloco_common.settings import OuterSettings
from diloco_server.core import arithmetic as shard_arithmetic
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.merge import piece_norms
from diloco_server.core.outer import make_outer_optimizer
from diloco_server.core.rounds import Contribution
from diloco_simulator import number_file, numbers
from diloco_simulator.model import Counting, pattern_of, replica
from diloco_simulator.numbers import Number, NumberReplica

ArithmeticName = Literal["tensors", "numbers"]
Value = Any
"""Of a fragment: a float32 tensor [num_elements], or a `Number`."""


class Arithmetic(Protocol):
    """All that a simulated process computes, apart from its core."""

    # -------------------------------------------------------- a learner
    def model(self, start: float, num_fragments: int) -> tuple[Any, Any]:
        """A model that has `train_on(tokens)`, and its replica. Every parameter begins at `start` patterns."""

    def pattern(self, fragment: Fragment) -> Value:
        """What one token adds."""

    def theta(self, replica: Any, fragment: Fragment) -> Value:
        """A copy of the model's values."""

    def encode_seed(self, values: Value, encoding: str) -> Payload: ...

    def decode_version(self, payload: Payload, anchor: Value | None) -> Value:
        """Of a payload that holds values, or with an anchor the change from it."""

    # -------------------------------------------------------- a shard
    def norms(self, payload: Payload, pieces: Sequence[Piece]) -> tuple[float, ...]: ...

    def seed(self, payload: Payload) -> Values: ...

    def step(self, values: Values, fragment: Fragment, round_: Sequence[Contribution], version: int, rule: str) -> None:
        """Merge a closed round and take one outer step, in place: SGD with a rate of 1."""

    def publish(self, values: Values, encoding: str, before: Published | None) -> Published: ...

    # -------------------------------------------------------- the judge
    def decoded(self, payload: Payload) -> Value: ...

    def plus(self, values: Value | None, pattern: Value, tokens: int) -> Value:
        """values + tokens * pattern; None: of zeros."""

    def lost(self, meant: Value, payload: Payload) -> Value:
        """meant - decoded."""

    def distance(self, a: Value, b: Value) -> float:
        """The largest difference of two elements."""

    def same(self, a: Value, b: Value) -> bool:
        """Bit for bit."""


class Tensors:
    """As in production: codecs, merge and outer step on a model of 23 elements."""

    def __init__(self) -> None:
        self._outer = make_outer_optimizer(OuterSettings(optimizer="sgd", lr=1.0, momentum=0.0))

    def model(self, start: float, num_fragments: int) -> tuple[Any, Any]:
        model = Counting(start)
        return model, replica(model)

    def pattern(self, fragment: Fragment) -> Value:
        return pattern_of(fragment)

    def theta(self, replica: Any, fragment: Fragment) -> Value:
        out = torch.empty(fragment.num_elements)
        replica.read(fragment, out)
        return out

    def encode_seed(self, values: Value, encoding: str) -> Payload:
        return encode_payload(values, encoding)

    def decode_version(self, payload: Payload, anchor: Value | None) -> Value:
        values = torch.empty(payload.header.num_elements)
        decode_version(payload, anchor, values)
        return values

    def norms(self, payload: Payload, pieces: Sequence[Piece]) -> tuple[float, ...]:
        return piece_norms(payload, pieces)

    def seed(self, payload: Payload) -> Values:
        return shard_arithmetic.seed(payload, self._outer)

    def step(self, values: Values, fragment: Fragment, round_: Sequence[Contribution], version: int, rule: str) -> None:
        shard_arithmetic.step(values, fragment, round_, outer_step=version, rule=rule, optimizer=self._outer)

    def publish(self, values: Values, encoding: str, before: Published | None) -> Published:
        return shard_arithmetic.publish(values, encoding, before)

    def decoded(self, payload: Payload) -> Value:
        out = torch.empty(payload.header.num_elements)
        decode_payload(payload, out)
        return out

    def plus(self, values: Value | None, pattern: Value, tokens: int) -> Value:
        return pattern * float(tokens) if values is None else torch.add(values, pattern, alpha=tokens)

    def lost(self, meant: Value, payload: Payload) -> Value:
        return meant - self.decoded(payload)

    def distance(self, a: Value, b: Value) -> float:
        return float((a - b).abs_().max())

    def same(self, a: Value, b: Value) -> bool:
        return torch.equal(a, b)


class Numbers:
    """A fragment is the number of tokens in it."""

    def model(self, start: float, num_fragments: int) -> tuple[Any, Any]:
        model = NumberReplica(num_fragments, start)
        return model, model

    def pattern(self, fragment: Fragment) -> Value:
        return None

    def theta(self, replica: Any, fragment: Fragment) -> Value:
        return replica.theta(fragment).clone()

    def encode_seed(self, values: Value, encoding: str) -> Payload:
        return numbers.payload(values.value, encoding)

    def decode_version(self, payload: Payload, anchor: Value | None) -> Value:
        return Number(numbers.carried(payload) + (0.0 if anchor is None else anchor.value))

    def norms(self, payload: Payload, pieces: Sequence[Piece]) -> tuple[float, ...]:
        return (abs(numbers.carried(payload)),)

    def seed(self, payload: Payload) -> Values:
        return Values(self.decoded(payload), [])

    def step(self, values: Values, fragment: Fragment, round_: Sequence[Contribution], version: int, rule: str) -> None:
        theta: Any = values.theta
        theta.value -= numbers.merged([(c.weight, numbers.carried(c.payload)) for c in round_], rule)

    def publish(self, values: Values, encoding: str, before: Published | None) -> Published:
        theta: Any = values.theta
        return numbers.publish(theta.value, encoding, before)

    def decoded(self, payload: Payload) -> Value:
        return Number(numbers.carried(payload))

    def plus(self, values: Value | None, pattern: Value, tokens: int) -> Value:
        return Number(tokens if values is None else values.value + tokens)

    def lost(self, meant: Value, payload: Payload) -> Value:
        return Number(meant.value - numbers.carried(payload))

    def distance(self, a: Value, b: Value) -> float:
        return float(abs(a.value - b.value))

    def same(self, a: Value, b: Value) -> bool:
        return bool(a.value == b.value)


@cache
def arithmetic_of(name: ArithmeticName) -> Arithmetic:
    return Tensors() if name == "tensors" else Numbers()


@contextmanager
def computing_with(name: ArithmeticName) -> Iterator[Arithmetic]:
    """Within, a learner's core computes on tensors, or on numbers, and a store keeps them in files."""
    if name == "tensors":
        yield arithmetic_of(name)
        return
    module: Any = learner_fragment
    files: Any = storage
    before = module.torch, module.encode_payload, files.write_version, files.read_version
    module.torch, module.encode_payload = numbers.AsTorch, numbers.encode_payload
    files.write_version, files.read_version = number_file.write_version, number_file.read_version
    try:
        yield arithmetic_of(name)
    finally:
        module.torch, module.encode_payload, files.write_version, files.read_version = before
