"""Which buffers are shared, by which rule; how they are read and written; what a model in 16 bits rounds."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
from test_learner_core import EPOCH, delta_of_snapshot
from torch import Tensor, nn

from diloco_common.errors import BadRequest, ModelChanged, UnsupportedModel
from diloco_common.wire.manifest import check_kinds, cut
from diloco_common.wire.messages import Collect, LearnerPolicy
from diloco_worker.core.copies import find_copies
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet


def holding(*, parameter: bool = True, **buffers: Tensor) -> nn.Module:
    module = nn.Module()
    if parameter:
        module.w = nn.Parameter(torch.zeros(3))
    for name, values in buffers.items():
        module.register_buffer(name, values)
    return module


def spectral(old: bool) -> nn.Module:
    layer = nn.Linear(3, 2)
    return nn.utils.spectral_norm(layer) if old else nn.utils.parametrizations.spectral_norm(layer)


COUNTER = torch.tensor(5)
RULES: list[tuple[str, Callable[[], nn.Module], dict[str, str], list[str]]] = [
    ("BatchNorm", lambda: nn.BatchNorm2d(3),
     {"num_batches_tracked": "most int64", "running_mean": "mean float32", "running_var": "variance float32"}, []),
    ("InstanceNorm", lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
     {"num_batches_tracked": "most int64", "running_mean": "mean float32", "running_var": "variance float32"}, []),
    ("a variance of another shape", lambda: holding(running_mean=torch.ones(1), running_var=torch.ones(3)),
     {"running_mean": "mean float32", "running_var": "mean float32"}, []),
    ("spectral norm", lambda: spectral(old=False),
     {"parametrizations.weight.0._u": "one float32", "parametrizations.weight.0._v": "one float32"}, []),
    ("spectral norm of before", lambda: spectral(old=True), {"weight_u": "one float32", "weight_v": "one float32"}, []),
    ("codebook", lambda: holding(codes=torch.randn(2, 2).double()), {"codes": "mean float64"}, []),
    ("indices", lambda: holding(ids=torch.arange(4)), {"ids": "one int64"}, []),
    ("a mask", lambda: holding(mask=torch.ones(2, 2).bool()), {"mask": "one bool"}, []),
    ("packed weights", lambda: holding(parameter=False, qweight=torch.arange(4, dtype=torch.int32),
                                       scales=torch.ones(2).half()), {}, ["qweight", "scales"]),
    ("complex", lambda: holding(freqs=torch.ones(2, dtype=torch.complex64)), {}, ["freqs"]),
]  # fmt: skip


@pytest.mark.parametrize(("make", "rules", "frozen"), [row[1:] for row in RULES], ids=[row[0] for row in RULES])
def test_a_buffer_has_the_rule_of_its_kind(make, rules: dict[str, str], frozen: list[str]) -> None:
    found = SharedSet(make(), "all").buffers
    assert {name: f"{b.spec.rule} {b.spec.dtype}" for name, b in found.shared.items()} == rules
    assert list(found.frozen) == frozen
    check_kinds([b.spec for b in found.shared.values()])


UNSENDABLE: list[tuple[str, Tensor, str]] = [
    ("infinities", torch.tensor([0.0, -torch.inf]), "holds infinities or NaN"),
    ("NaN", torch.full((2,), torch.nan).half(), "holds infinities or NaN"),
    ("more than float32 has", torch.tensor([1e300]).double(), "holds infinities or NaN"),
    ("large integers", torch.tensor([1 << 40, 1]), "holds integers above 2^24"),
    ("expanded", torch.zeros(1, 3).expand(2, 3), "has elements that are the same memory"),
]


@pytest.mark.parametrize(("buffer", "why"), [row[1:] for row in UNSENDABLE], ids=[row[0] for row in UNSENDABLE])
def test_what_cannot_be_sent_is_refused_by_name_and_may_be_private(buffer: Tensor, why: str) -> None:
    model = nn.ModuleDict({"mask": holding(values=buffer)})
    with pytest.raises(UnsupportedModel, match=rf'mask\.values {re.escape(why)}.*private=\["mask\.values"\]'):
        SharedSet(model)
    found = SharedSet(model, private="mask.values").buffers
    assert not found.shared
    assert not found.frozen


def test_what_is_computed_or_private_is_not_shared() -> None:
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "bank": holding(queue=torch.zeros(2), count=COUNTER)})
    model.register_buffer("rotary", torch.ones(3), persistent=False)
    assert list(SharedSet(model, private=["bank.*"]).buffers.shared) == [
        "norm.num_batches_tracked", "norm.running_mean", "norm.running_var",
    ]  # fmt: skip
    alone = SharedSet(model, private=["norm.running_mean"]).buffers.shared
    assert alone["norm.running_var"].spec.rule == "mean", "without its mean there is nothing to pool"
    with pytest.raises(BadRequest, match="no running mean"):
        check_kinds([alone["norm.running_var"].spec._replace(rule="variance")])


def model_of_all() -> nn.Module:
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "more": holding(ids=torch.arange(4), on=torch.tensor(False))})
    model.register_buffer("grid", torch.arange(6.0).view(2, 3).T)
    return model


def test_versions_are_written_over_buffers_of_all_kinds_in_place_and_contributions_hold_what_they_are() -> None:
    model, other = model_of_all(), model_of_all()
    other["norm"](torch.randn(8, 3))
    other["more"].on.fill_(True)
    other.grid.mul_(-2)
    sent, taken = Replica(other), Replica(model)
    kept = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    (fragment,) = [f for f in cut(sent.specs, 1, 1).fragments if f.kind == "buffer"]
    contribution = torch.empty(fragment.num_elements)
    sent.progress(fragment, torch.full((fragment.num_elements,), torch.nan), contribution)
    taken.write(fragment, -contribution)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == kept


def test_what_training_keeps_for_itself_is_written_only_at_its_ends() -> None:
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "more": holding(count=torch.tensor(9), codes=torch.zeros(2))})
    replica = Replica(model)
    (fragment,) = [f for f in cut(replica.specs, 1, 1).fragments if f.kind == "buffer"]
    version = torch.full((fragment.num_elements,), 5.0)
    replica.write(fragment, version, trains_on=True)
    assert model["norm"].running_var.tolist() == [1, 1, 1]
    assert int(model["more"].count) == 9, "it is ahead"
    assert model["more"].codes.tolist() == [5, 5]
    replica.write(fragment, version)
    assert all((buffer == 5).all() for buffer in model.buffers())


def test_a_buffer_that_its_module_replaces_is_followed_and_one_of_another_shape_is_refused() -> None:
    model = holding(bank=torch.zeros(4))
    replica = Replica(model)
    (fragment,) = [f for f in cut(replica.specs, 1, 1).fragments if f.kind == "buffer"]
    out = torch.empty(4)
    model.bank = torch.ones(4)
    replica.read(fragment, out)
    assert out.tolist() == [1, 1, 1, 1]
    model.bank = torch.ones(5)
    with pytest.raises(ModelChanged, match=r'bank is of shape \(5,\) now.*private=\["bank"\]'):
        replica.read(fragment, out)


DTYPES = torch.float32, torch.bfloat16, torch.float16
SIXTEEN = DTYPES[1:]


class Rig:
    """A learner with one fragment: a matrix, one that is laid out otherwise, and one in float32."""

    def __init__(self, dtype: torch.dtype, copies: torch.dtype | None = None) -> None:
        """`copies`: the optimizer keeps such copies of the parameters."""
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.a = nn.Parameter(torch.randn(40, 50).to(dtype))
        self.model.b = nn.Parameter(torch.randn(50, 40).to(dtype).t())
        self.model.c = nn.Parameter(torch.randn(30).to(dtype))
        chosen = SharedSet(self.model)
        self.replica = Replica(chosen)
        self.copies = {}
        if copies is not None:
            self.copies = {name: p.detach().to(copies, copy=True) for name, p in self.model.named_parameters()}
            self.replica.keep_copies(find_copies(self.copies.get, chosen))
        policy = LearnerPolicy(4, "float32", "float32")
        (self.fragment,) = cut(self.replica.specs, 1, 1).fragments
        self.core = LearnerCore(self.replica, cut(self.replica.specs, 1, 1), policy)

    def contributes(self, round_number: int) -> Tensor:
        self.core.stepped(5)
        self.core.collect(Collect(0, round_number, EPOCH), EPOCH)
        (taken,) = self.core.contribute()
        return delta_of_snapshot(taken)

    @torch.no_grad()
    def arrives(self, version: int, values: Tensor, merged: int = 0) -> None:
        self.core.arrived(0, version, EPOCH, values, merged)

    def version(self, dtype: torch.dtype) -> Tensor:
        """Numbers of many sizes, so that elements move far, too."""
        n = self.fragment.num_elements
        smallest = -8.0 if self.replica.rounds(self.fragment, dtype) else -3.0  # elsewhere it is one float32 addition
        return (torch.randn(n).sign() * 10 ** torch.empty(n).uniform_(smallest, 0)).to(dtype)

    @torch.no_grad()
    def theta(self) -> Tensor:
        return torch.cat([p.reshape(-1) for p in (self.model.a, self.model.b, self.model.c)])


@pytest.mark.parametrize(("model", "pull"), list(product(SIXTEEN, DTYPES[:2])))
@pytest.mark.parametrize("copies", [None, torch.bfloat16])
def test_who_trains_nothing_contributes_nothing(
    model: torch.dtype, pull: torch.dtype, copies: torch.dtype | None
) -> None:
    rig = Rig(model, copies if model == copies else None)
    rig.arrives(0, rig.version(pull))
    for number in range(1, 8):
        assert not rig.contributes(number).any()
        values = rig.version(pull)
        rig.arrives(number, values, merged=number if number % 2 else 0)
        assert torch.equal(rig.theta(), values.to(model))


@pytest.mark.parametrize("model", SIXTEEN)
def test_a_master_is_rounded_into_its_parameter_and_contributes_nothing_of_that(model: torch.dtype) -> None:
    rig = Rig(model, copies=torch.float32)
    rig.arrives(0, rig.version(torch.float32))
    for number in range(1, 4):
        assert not rig.contributes(number).any()
        values = torch.rand(rig.fragment.num_elements) + number  # so that float32 subtracts them without an error
        rig.arrives(number, values, merged=number)
        master = torch.cat([copy.reshape(-1) for copy in rig.copies.values()])
        torch.testing.assert_close(master, values, rtol=0, atol=1e-6)
        rig.arrives(number, master)  # what is left of it is float32's own


@pytest.mark.parametrize("model", SIXTEEN)
def test_what_was_trained_is_carried_without_the_rounding(model: torch.dtype) -> None:
    rig = Rig(model)
    n = rig.fragment.num_elements
    rig.arrives(0, 1 + 0.75 * torch.rand(n))
    with torch.no_grad():
        for parameter in rig.model.parameters():
            parameter.add_(0.125)
    rig.arrives(1, 2.25 + torch.rand(n) / 2)
    torch.testing.assert_close(rig.contributes(2), torch.full((n,), -0.125), rtol=0, atol=0)
