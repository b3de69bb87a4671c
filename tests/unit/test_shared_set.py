"""Which parameters are shared, private and frozen, by whatever name; in logical order, whatever their layout."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from diloco_common.errors import UnsupportedModel
from diloco_common.wire.manifest import cut
from diloco_worker.core import layout
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.shell.frozen_tensors import declare


class Net(nn.Module):
    """A body that is frozen, a table tied to a head by object or by memory, and a scale that no gradient can reach."""

    def __init__(self, tied: str = "object") -> None:
        super().__init__()
        self.body, self.wte, self.head = nn.Linear(4, 4, bias=False), nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        if tied == "object":
            self.head.weight = self.wte.weight
        else:
            self.head.weight.data = self.wte.weight.data
        self.body.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
        self.register_buffer("queue", torch.zeros(3))


@pytest.mark.parametrize(
    ("shared", "private", "are_shared", "are_private", "are_frozen"),
    [
        (None, (), ["head.weight"], [], ["body.weight", "scale"]),
        ("all", (), ["body.weight", "head.weight"], [], ["scale"]),
        (["*.weight"], (), ["body.weight", "head.weight"], [], ["scale"]),
        ("wte.*", (), ["head.weight"], [], ["body.weight", "scale"]),
        ("all", ["wte.weight"], ["body.weight"], ["head.weight"], ["scale"]),
        (None, ["body.*", "queue"], ["head.weight"], ["body.weight"], ["scale"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tied", ["object", "memory"])
def test_patterns_say_what_is_shared_by_any_name_of_a_tied_parameter(
    tied, shared, private, are_shared, are_private, are_frozen
) -> None:
    chosen = SharedSet(Net(tied), shared, private)
    assert (list(chosen.shared), list(chosen.private), list(chosen.frozen)) == (are_shared, are_private, are_frozen)
    assert chosen.ties == ({"wte.weight": "head.weight"} if "head.weight" in are_shared else {})


def test_what_is_shared_by_name_does_not_depend_on_what_is_frozen_at_the_moment() -> None:
    one, other = Net(), Net().requires_grad_(False)
    assert Replica(SharedSet(one, "all")).specs == Replica(SharedSet(other, "all")).specs
    assert declare(SharedSet(one, "all")) == declare(SharedSet(other, "all"))


def test_what_is_private_is_not_compared() -> None:
    assert [t.name for t in declare(SharedSet(Net(), None, ["body.*", "queue"]))] == ["scale"]


@pytest.mark.parametrize("tied", ["object", "memory"])
def test_a_tie_is_one_tensor_to_the_run(tied: str) -> None:
    (spec,) = Replica(SharedSet(Net(tied), private="queue")).specs
    assert (spec.name, spec.rule) == ("head.weight", "mean")


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([nn.Linear(2, 1), nn.Linear(1, 2)], ["0.bias", "0.weight", "1.bias", "1.weight"]),
        ((nn.Linear(2, 1),), ["0.bias", "0.weight"]),
        ({"critic": nn.Linear(2, 1), "actor": torch.compile(nn.Linear(2, 1, bias=False))}, [
            "actor.weight", "critic.bias", "critic.weight",
        ]),
        (OrderedDict(net=nn.Linear(2, 1, bias=False)), ["net.weight"]),
    ],
)  # fmt: skip
def test_several_models_are_one_with_names_that_say_which(models, expected: list[str]) -> None:
    assert list(SharedSet(models).shared) == expected


SHAPE = 5, 3, 2, 4
COUNT = 120


def numbered(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def permuted(values: Tensor, *order: int) -> Tensor:
    """The same values by index; in memory their dimensions come in this order."""
    inverse = torch.tensor(order).argsort().tolist()
    return values.permute(order).contiguous().permute(inverse)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "reversed": lambda t: permuted(t, 3, 2, 1, 0),
    "rotated": lambda t: permuted(t, 1, 2, 3, 0),
    "with gaps": lambda t: torch.stack([t, t], -1)[..., 0],
}


class Convolutions(nn.Module):
    """Two layers, one of them 1x1, whose strides are ambiguous, and what is no image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Linear(4, 6)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(x).relu()).mean((2, 3))
        return self.head(hidden)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_piece_is_its_elements_in_logical_order_and_in_place(kind: str) -> None:
    for start in range(0, COUNT, 23):
        for stop in range(start, COUNT + 1, 13):
            tensor = LAYOUTS[kind](numbered(*SHAPE))
            found = list(layout.parts(tensor, start, stop))
            values = [part.reshape(-1) for _, part in found]
            assert torch.equal(torch.cat([torch.empty(0), *values]), numbered(COUNT)[start:stop])
            assert [first for first, part in found if part.numel()] == [int(v[0]) for v in values if v.numel()]
            if start < stop:
                assert torch.equal(layout.flat(tensor, start, stop), numbered(COUNT)[start:stop])
            for _, part in found:
                part.fill_(-1.0)
            assert int(tensor.eq(-1).sum()) == stop - start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learners_of_different_layouts_agree(dtype: torch.dtype) -> None:
    plain = Convolutions().to(dtype)
    permuted = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    assert not permuted.first.weight.is_contiguous()
    replicas = Replica(plain), Replica(permuted)
    assert replicas[0].specs == replicas[1].specs
    for fragment in cut(replicas[0].specs, 2, 1).fragments:
        n = fragment.num_elements
        given = torch.randn(n)
        for out_dtype in (torch.float32, torch.bfloat16):
            outs = [torch.empty(n, dtype=out_dtype) for _ in replicas]
            for replica, out in zip(replicas, outs, strict=True):
                replica.progress(fragment, given.to(out_dtype), out)
            assert torch.equal(*outs)
        for change in (
            lambda r, f=fragment, v=given: r.add(f, v),
            lambda r, f=fragment, v=given: r.write(f, v),
        ):
            outs = [torch.empty(n) for _ in replicas]
            for replica, out in zip(replicas, outs, strict=True):
                change(replica)
                replica.read(fragment, out)
            assert torch.equal(*outs)
    for one, other in zip(plain.parameters(), permuted.parameters(), strict=True):
        assert torch.equal(one, other)
        assert other.dim() < 4 or other.is_contiguous(memory_format=torch.channels_last)


def of(**parameters: Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in parameters.items():
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def frozen_base(base: Tensor) -> nn.Module:
    model = of(w=base[:6], v=base[4:])
    model.w.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda base: of(w=base, v=base), ["v"]),
        (lambda base: of(w=base.view(4, 3), v=base.view(4, 3)), ["v"]),
        (lambda base: of(w=base[:6], v=base[6:]), ["v", "w"]),
        (lambda base: of(q=base.view(4, 3)[:, :1], v=base.view(4, 3)[:, 1:]), ["q", "v"]),
        (lambda base: of(w=base[:1].view(1, 1), v=base[:1].view(1, 1).T), ["v"]),
    ],
    ids=["same", "same-2d", "halves", "columns", "one-element"],
)
def test_the_same_elements_are_tied_and_neighbours_are_not(make: Callable[[Tensor], nn.Module], names) -> None:
    assert sorted(spec.name for spec in Replica(make(torch.randn(12))).specs) == names


@pytest.mark.parametrize(
    "make",
    [
        lambda base: of(w=base[:8], v=base[4:]),
        lambda base: of(w=base.view(4, 3), v=base.view(4, 3).T),
        lambda base: of(w=base.view(3, 4), v=base.view(4, 3)),
        lambda base: of(w=base, v=base[::2]),
        frozen_base,
    ],
    ids=["shifted", "transposed", "reshaped", "every-second", "frozen"],
)
def test_other_views_of_the_same_memory_are_refused_by_name(make: Callable[[Tensor], nn.Module]) -> None:
    with pytest.raises(UnsupportedModel, match=r"(v and w|w and v) share memory, .* Tie them as one") as caught:
        Replica(make(torch.randn(12)))
    assert "\n" not in str(caught.value)
