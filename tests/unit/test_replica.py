"""Which parameters of a user's model are synchronised, and how values get in and out, or in for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from diloco_common.errors import UnsupportedModel
from diloco_common.wire.manifest import cut
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet, as_module
from diloco_worker.shell.other_values import OtherValues, beside, write
from parts import Rig


class Block(nn.Module):
    """A submodule whose name ends like a wrapper's prefix, parameters of odd shapes, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.submodule = nn.Linear(3, 2)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.norm = nn.BatchNorm1d(2)


class Language(nn.Module):
    def __init__(self, *, tied: bool, head_first: bool = False) -> None:
        super().__init__()
        embedding, head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=True)
        if tied:
            head.weight = embedding.weight
        for name, module in [("head", head), ("tokens", embedding)][:: 1 if head_first else -1]:
            self.add_module(name, module)
        self.body = nn.Linear(4, 4)


def names(model: nn.Module) -> list[str]:
    return sorted(spec.name for spec in Replica(model).specs if spec.kind == "parameter")


def test_trainable_parameters_count_and_no_others() -> None:
    assert names(Block()) == ["gain", "norm.bias", "norm.weight", "nothing", "submodule.bias", "submodule.weight"]


def test_the_user_may_say_what_takes_the_mean() -> None:
    specs = Replica(Language(tied=False), mean_merge={"body.weight"}).specs
    assert [s.name for s in specs if s.rule == "mean"] == ["body.weight"]


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def with_parameter(tensor: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.w = nn.Parameter(tensor)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (frozen, "no trainable parameters; set requires_grad"),
        (lambda: with_parameter(torch.empty(0)), "no trainable parameters"),
        (lambda: with_parameter(torch.randn(1, 4).expand(3, 4)), r"w has elements that share memory, .*contiguous"),
        (lambda: with_parameter(torch.randn(4).double()), r"w is torch.float64; .* must be float32, bfloat16"),
        (lambda: with_parameter(torch.zeros(4, dtype=torch.complex64)), r"w is torch.complex64"),
        (lambda: nn.Linear(2, 2, device="meta"), "on the meta device; materialize"),
    ],
    ids=["frozen", "empty", "expanded", "float64", "complex", "meta"],
)
def test_an_unsupported_model_is_refused_in_words_that_say_what_to_do(make, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        Replica(make())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_read_back_over_all_fragments(dtype: torch.dtype) -> None:
    model = Block().to(dtype)
    replica = Replica(model)
    manifest = cut(replica.specs, 3, 1)
    statistics = [b.clone() for b in model.norm.buffers()]
    for fragment in manifest.model_fragments:
        values = torch.arange(fragment.num_elements, dtype=torch.float32) + 100 * fragment.fragment_id
        replica.write(fragment, values)
        out = torch.empty(fragment.num_elements)
        replica.read(fragment, out)
        assert torch.equal(out, values)
    written = sorted(float(v) for p in model.parameters() for v in p.detach().float().view(-1))
    assert written == sorted(100.0 * f.fragment_id + i for f in manifest.model_fragments for i in range(f.num_elements))
    assert all(p.dtype == dtype for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.norm.buffers(), statistics, strict=True)), (
        "buffers have fragments of their own"
    )


@pytest.mark.parametrize(
    ("own", "change", "dtypes", "expected"),
    [
        (torch.tensor(2.0), lambda r, f: r.add(f, torch.tensor([4.0])), "fb", 6.0),  # of no dimension
        # -255.5 is none of bfloat16's numbers; rounded on the way, the result would be 0.
        (torch.tensor([256.0]), lambda r, f: r.add(f, torch.tensor([-255.5])), "b", 0.5),
    ],
)
def test_differences_are_added_in_float32(own, change, dtypes: str, expected: float) -> None:
    for dtype in dtypes:
        model = with_parameter(own.to({"f": torch.float32, "b": torch.bfloat16}[dtype], copy=True))
        replica = Replica(model)
        (fragment,) = cut(replica.specs, 24, 1).fragments
        change(replica, fragment)
        assert model.w.item() == expected


class Net(nn.Module):
    """What a model has beside shared parameters: statistics, a head of its own, and a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(3, 4).bfloat16(), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("codes", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.body(x.bfloat16()).float())
        self.codes = self.codes + hidden.detach().mean(0)
        return self.head(hidden)


def bits(model: nn.Module) -> list[list[int]]:
    tensors = [*model.parameters(), *model.buffers()]
    return [t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if t.dim() else [int(t)] for t in tensors]


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_whatever_the_body_does_to_the_model_is_undone_bit_for_bit(error: type[BaseException] | None) -> None:
    net = Net()
    with torch.no_grad():
        net.body.weight[0] = torch.tensor([-0.0, float("nan"), 1e-40])
    before, objects = bits(net), [id(b) for b in net.buffers()]
    others = OtherValues(Replica(SharedSet(net, private="head.*")), lambda: None)
    pairs = others.beside({name: torch.ones_like(p) for name, p in net.named_parameters()})

    def body() -> None:
        with others.instead("values()", partial(write, pairs), [theta for theta, _ in pairs]):
            assert all(p.eq(1).all() for p in net.parameters())
            net.train()(torch.randn(5, 3))
            if error is not None:
                raise error

    with nullcontext() if error is None else pytest.raises(error):
        body()
    assert bits(net) == before
    assert [id(b) for b in net.buffers()] == objects
    others.check()  # it is over


def averaged() -> nn.Module:
    return AveragedModel(Net())


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (Net, Net),
        (Net, averaged),
        (Net, lambda: averaged().state_dict()),
        (Net, lambda: torch.compile(Net()).state_dict()),
        (lambda: torch.compile(Net()), lambda: Net().state_dict()),
        (lambda: [Net(), Net()], lambda: [Net(), Net()]),
        (lambda: {"actor": Net()}, lambda: {"actor": averaged()}),
        (lambda: {"actor": Net()}, lambda: nn.ModuleDict({"actor": Net()}).state_dict()),
    ],
    ids=["module", "averaged", "its-state", "compiled-state", "into-compiled", "list", "dict", "dict-state"],
)  # fmt: skip
def test_values_find_their_tensors_whatever_wraps_the_one_or_the_other(
    model: Callable[[], Any], values: Callable[[], Any]
) -> None:
    module = as_module(model())
    found = beside(module, values())
    assert {t.data_ptr() for t, _ in found} == {t.data_ptr() for t in (*module.parameters(), *module.buffers())}


def test_what_is_not_named_stays_and_dtypes_are_those_of_the_model() -> None:
    net = Net()
    before = net.norm.weight.clone()
    write(beside(net, {"body.weight": torch.full((4, 3), 1.5, dtype=torch.float64)}))
    assert net.body.weight.eq(1.5).all()
    assert net.body.weight.dtype == torch.bfloat16
    assert torch.equal(net.norm.weight, before)


def test_the_newest_global_values_are_in_the_model_and_then_no_longer() -> None:
    rig = Rig()
    rig.steps(by=2.0)
    rig.arrives(0, 1, 20.0)
    rig.learner.poll()
    with rig.learner.global_values():
        assert rig.values == [20.0, 10.0]
        rig.arrives(1, 1, 30.0)
    assert rig.values == [22.0, 12.0], "what has arrived meanwhile waits"
    rig.learner.poll()
    assert rig.values == [22.0, 32.0]


def test_who_restores_a_checkpoint_trains_on_from_it_and_contributes_the_way_there() -> None:
    rig = Rig()
    rig.steps(by=2.0)
    rig.learner.restore({"0": torch.full((1,), 5.0), "1": torch.full((1,), 6.0)})
    rig.asks()
    rig.steps(by=1.0)
    assert rig.contributed() == [4.0, 3.0]
