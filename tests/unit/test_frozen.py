"""What learners hold fixed must be the same: which tensors they declare, how long that binds, how a refusal reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from builders import asking
from diloco_common.errors import FrozenMismatch
from diloco_common.wire.bounds import FROZEN_BYTES_MAX
from diloco_common.wire.messages import FrozenTensor
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.shell import frozen_tensors
from diloco_worker.shell.frozen_tensors import declare
from rig import MODEL, Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()


def base(values: int, *, names: str = "abc", form: str = "bfloat16 [4, 4]") -> list[FrozenTensor]:
    return [FrozenTensor(f"{name}.weight", form, values) for name in names]


def joined(rig: Rig, learner_id: str, frozen: list[FrozenTensor]) -> None:
    rig.members[learner_id] = rig.shard.join(learner_id, asking(MODEL, frozen=tuple(frozen)), rig.now)
    rig.steps.setdefault(learner_id, 0)
    rig.report(learner_id)


def refused(rig: Rig, frozen: list[FrozenTensor]) -> str:
    """How another learner with these is refused; nothing has changed."""
    there = rig.shard.membership.all()
    with pytest.raises(FrozenMismatch) as refusal:
        rig.shard.join("other", asking(MODEL, frozen=tuple(frozen)), rig.now)
    assert rig.shard.membership.all() == there
    return str(refusal.value)


SAME = base(1)
UNKNOWN = [FrozenTensor(t.name, t.form, None) for t in SAME]
MIXED = [FrozenTensor("a.weight", "float32 [4, 4]", 1), *base(2, names="b"), *base(1, names="d")]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (base(2), "brought to this run .*: a.weight: bfloat16 .4, 4. with other values; b.weight: .*; c.weight: "),
        (MIXED, r"a.weight: bfloat16 \[4, 4\] <-> float32 \[4, 4\]; b.weight: bfloat16 \[4, 4\] with other values; "),
        (MIXED, r"c.weight: bfloat16 \[4, 4\] <-> absent; and 1 more\. Load the same"),
        (base(1, names="ab"), r"caller's\): c.weight: bfloat16 \[4, 4\] <-> absent\. "),
        (base(2), r'Load the same base in the same dtype; or, .* join\(\.\.\., frozen="any"\)'),
    ],
)
def test_another_base_is_refused_and_the_first_differences_are_named(rig, theirs, words) -> None:
    joined(rig, "a", SAME)
    joined(rig, "b", SAME)
    with pytest.raises(FrozenMismatch, match=f"those that a .*{words}"):
        rig.shard.join("c", asking(MODEL, frozen=tuple(theirs)), 0.0)


@pytest.mark.parametrize(
    "there",
    [
        [("any", []), ("a", SAME), ("any too", [])],  # who allows differences is not compared and binds nobody
        [("a", UNKNOWN), ("b", SAME), ("c", UNKNOWN)],  # resumed learners: training may have changed their buffers
        [("a", SAME), ("a", SAME)],  # who comes back is compared with itself
    ],
    ids=["any", "without a checksum", "again"],
)
def test_who_allows_differences_is_not_compared_and_binds_nobody(rig: Rig, there: list[tuple[str, Any]]) -> None:
    for learner_id, frozen in there:
        joined(rig, learner_id, frozen)
    refused(rig, base(2))
    refused(rig, base(1, form="float32 [4, 4]"))


def test_while_nothing_is_trained_a_learner_that_has_gone_binds_nobody(rig: Rig) -> None:
    """Also after a restart of the shard: who came first with the wrong base is refused elsewhere, and leaves."""
    joined(rig, "wrong", base(2))
    rig.seed("wrong")
    rig.shard.leave(rig.members["wrong"])
    joined(rig, "right", SAME)
    refused(rig, base(2))


def test_what_a_version_was_trained_with_binds_also_when_everybody_has_gone(rig: Rig) -> None:
    joined(rig, "a", SAME)
    rig.seed("a")
    rig.step("a", steps=4)
    rig.contribute("a", 1)
    assert rig.state.version == 1
    rig.shard.leave(rig.members["a"])
    refused(rig, base(2))
    joined(rig, "b", SAME)


class Lora(nn.Module):
    """A frozen base with tied weights, statistics, buffers of all kinds; and one adapter that is trained."""

    def __init__(self, order: str = "eh") -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding, head, base = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False), nn.Linear(4, 4)
        head.weight = embedding.weight
        for letter in order:
            self.add_module(letter, {"e": embedding, "h": head}[letter])
        self.base, self.norm = base, nn.BatchNorm1d(4)
        self.register_buffer("packed", torch.arange(4, dtype=torch.uint8))
        self.register_buffer("scales", torch.rand(4))
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.requires_grad_(False)
        self.adapter = nn.Linear(4, 1, bias=False)


def names(model: nn.Module) -> list[str]:
    return [t.name for t in declare(SharedSet(model))]


def changed(model: nn.Module, change: Callable[[nn.Module], object]) -> list[str]:
    """The names of what is declared in another way once the model is changed."""
    before = declare(SharedSet(model))
    with torch.no_grad():
        change(model)
    return [new.name for old, new in zip(before, declare(SharedSet(model)), strict=True) if old != new]


def test_frozen_parameters_and_packed_weights_are_declared_and_statistics_are_not() -> None:
    fixed = ["base.bias", "base.weight", "e.weight", "norm.bias", "norm.weight", "packed", "scales"]
    assert names(Lora()) == fixed
    assert names(torch.compile(Lora())) == fixed
    assert names(nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        pytest.param(lambda m: m.base.weight[3, 2].add_(1e-6), ["base.weight"], id="one value"),
        pytest.param(lambda m: m.base.weight.copy_(m.base.weight.T.clone()), ["base.weight"], id="the order"),
        pytest.param(lambda m: m.h.weight.mul_(-1), ["e.weight"], id="a tied weight"),
        pytest.param(lambda m: m.packed.zero_(), ["packed"], id="packed weights"),
        pytest.param(lambda m: setattr(m, "scales", m.scales.half()), ["scales"], id="a dtype"),
        pytest.param(lambda m: m.norm.running_mean.add_(1), [], id="statistics"),
        pytest.param(lambda m: m.adapter.weight.zero_(), [], id="what is trained"),
    ],
)
def test_every_change_of_what_is_fixed_is_noticed_and_no_other(change, noticed: list[str]) -> None:
    assert changed(Lora(), change) == noticed


def only(tensor: torch.Tensor) -> FrozenTensor:
    model = nn.Module()
    model.w = nn.Parameter(tensor, requires_grad=False)
    (declared,) = declare(SharedSet(model))
    return declared


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(70.0).view(7, 10),
        torch.arange(70.0).view(10, 7).T,
        torch.arange(70, dtype=torch.float64).view(7, 5, 2).permute(1, 2, 0),
        torch.randn(9, 9).bfloat16().T,
    ],
    ids=["contiguous", "transposed", "permuted", "bfloat16"],
)
@pytest.mark.parametrize("chunk_bytes", [8, 24, 100])
def test_large_tensors_are_read_in_parts_row_by_row_however_they_lie(monkeypatch, tensor, chunk_bytes: int) -> None:
    whole = only(tensor.contiguous())
    monkeypatch.setattr(frozen_tensors, "CHUNK_BYTES", chunk_bytes)
    assert only(tensor) == whole
    assert all(chunk.nbytes <= chunk_bytes for chunk in frozen_tensors._chunks(tensor))


def test_a_tensor_made_of_others_is_read_through_as_those_of_torchao_are() -> None:
    a, b = torch.ones(2, 2), torch.zeros(2, 2)
    assert only(TwoTensor(a, b)) == only(TwoTensor(a.clone(), b.clone()))
    assert only(TwoTensor(a, b)) != only(TwoTensor(b, a))


def test_neighbours_are_declared_as_one_where_there_are_too_many(monkeypatch) -> None:
    monkeypatch.setattr(frozen_tensors, "FROZEN_MAX", 3)
    model = nn.ParameterList(nn.Parameter(torch.full((2,), float(i)), requires_grad=False) for i in range(7))

    assert names(model) == ["0 to 2", "3 to 5", "6"]
    assert changed(model, lambda m: m[4].add_(1)) == ["3 to 5"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 2), torch.rand(4, 3).T, torch.rand(3).bfloat16(), torch.tensor(2.0).double(), torch.zeros(2, 0),
        torch.arange(5, dtype=torch.uint8), torch.rand(2, 3).to(torch.complex64), torch.rand(FROZEN_BYTES_MAX // 4),
    ],
)  # fmt: skip
def test_small_ones_are_told_with_their_values(tensor: torch.Tensor) -> None:
    told = frozen_tensors.values_of(only(tensor))
    assert told is None if tensor.numel() == 0 else torch.equal(told, tensor)


def test_a_base_is_told_without_its_values() -> None:
    assert only(torch.rand(FROZEN_BYTES_MAX // 4 + 1)).values == b""
    assert only(TwoTensor(torch.rand(2), torch.rand(2))).values == b"", "of more than one tensor"
