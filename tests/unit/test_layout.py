"""Values are in logical order, whatever the layout of a parameter; memory that parameters share is tied or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from diloco_common.errors import UnsupportedModel
from diloco_common.wire.manifest import cut
from diloco_worker.core import layout
from diloco_worker.core.replica import Replica

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
