"""Which parameters of a user's model are synchronised, under which names, and how values get in and out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco_common.errors import UnsupportedModel
from diloco_common.wire.manifest import cut
from diloco_worker.core.replica import Replica


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
        (lambda: nn.Linear(2, 2, device="meta"), "on the meta device; materialise"),
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
