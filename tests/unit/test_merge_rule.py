"""Which merge rule a run takes and keeps, and how contributions are read for it. tests/numerics has the formulas."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from builders import decoded, make_contribution, merge, one_piece, random_values
from diloco_common.codec import Payload, encode_payload
from diloco_common.wire.manifest import Piece
from diloco_common.wire.messages import ADAM, OTHER
from diloco_server.core.fragment import Restored
from diloco_server.core.ledger import MergeChosen, MergeStays
from diloco_server.core.merge import piece_norms
from diloco_worker.core.replica import Replica
from rig import Rig


def run(*inner: str, merge: str = "auto", restored: Restored | None = None, model: Rig | None = None) -> Rig:
    """A shard whose learners have each said what they train with."""
    rig = Rig(sync={"merge": merge})
    if restored is not None:
        assert model is not None
        rig.shard.versions.restore(model.shard.manifest, [restored])  # type: ignore[arg-type]
    for number, said in enumerate(inner):
        rig.join(name := f"learner-{number}")
        rig.report(name, inner=said)
        rig.report(name, inner=said)  # again, as each of its reports does
    return rig


def rounds(rig: Rig, count: int = 1) -> Rig:
    names = [*rig.members]
    if not rig.state.seeded:
        rig.seed(names[0])
    for _ in range(count):
        rig.step(*names, steps=4)
        for name in names:
            rig.contribute(name, rig.state.version + 1 if name == names[0] else rig.state.round.round)  # type: ignore[union-attr]
    return rig


def kept(rig: Rig) -> Restored:
    record, values = deepcopy((rig.state.record, rig.state.values))
    return Restored(record, values, rig.state.published, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inner", "merge", "taken", "stays"),
    [
        ([ADAM, ADAM], "auto", "agreement", []),
        ([OTHER, OTHER], "auto", "mean", []),
        (["", ADAM], "auto", "agreement", []),  # the first that says it
        ([ADAM, OTHER], "auto", "agreement", ["learner-1"]),
        ([OTHER, ADAM], "auto", "mean", ["learner-1"]),
        (["", ""], "auto", "mean", []),  # nobody does
        ([ADAM, ADAM], "mean", "mean", []),
        ([OTHER, OTHER], "rda", "rda", []),
    ],
)
def test_the_first_learner_that_says_what_it_trains_with_decides(
    inner: list[str], merge: str, taken: str, stays: list[str]
) -> None:
    rig = rounds(run(*inner, merge=merge))

    assert rig.shard.versions.merge == taken
    assert rig.state.record.merge == (taken if merge == "auto" else "")
    assert [fact.merge for fact in rig.noted(MergeChosen)] == ([taken] if merge == "auto" else [])
    assert [fact.learner_id for fact in rig.noted(MergeStays)] == stays


@pytest.mark.parametrize(("merge", "theta"), [("auto", -0.5), ("mean", -1.0)])
def test_equal_contributions_of_adam_are_shortened_unless_the_settings_say_the_mean(merge: str, theta: float) -> None:
    assert rounds(run(ADAM, ADAM, merge=merge)).theta == [theta]


@pytest.mark.parametrize(("merge", "taken", "record"), [("auto", "agreement", "agreement"), ("mean", "mean", "")])
def test_a_shard_that_comes_back_goes_on_with_the_rule_of_its_run(merge: str, taken: str, record: str) -> None:
    before = rounds(run(ADAM))

    rig: Any = run(OTHER, merge=merge, restored=kept(before), model=before)
    rounds(rig)

    assert rig.shard.versions.merge == taken
    assert rig.state.record.merge == record
    assert not rig.noted(MergeChosen)
    assert [fact.learner_id for fact in rig.noted(MergeStays)] == (["learner-0"] if merge == "auto" else [])


SIZE = 1000


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("rule", ["rda", "mean", "agreement"])
def test_contributions_stay_compressed_until_they_are_merged(encoding: str, rule: str) -> None:
    vectors = [random_values(SIZE, seed) for seed in range(3)]
    compressed = [make_contribution(i, v, encoding=encoding) for i, v in zip("abc", vectors, strict=True)]
    plain = [make_contribution(i, v) for i, v in zip("abc", vectors, strict=True)]
    got = merge(compressed, one_piece(SIZE), rule)
    expected = merge(plain, one_piece(SIZE), rule)
    limit = {"float32": 0.0, "bfloat16": 0.01, "int8": 0.02, "int4": 0.3}[encoding]
    assert float((got - expected).norm() / expected.norm()) <= limit

    received = [make_contribution(c.learner_id, decoded(c.payload)) for c in compressed]
    torch.testing.assert_close(got, merge(received, one_piece(SIZE), rule), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("values", "finite"), [([1.0, 2.0], True), ([1.0, math.nan], False), ([math.inf, 0.0], False)])
def test_a_norm_is_finite_exactly_where_its_piece_is(values: list[float], finite: bool) -> None:
    pieces = (Piece("a", 0, 2, 0), Piece("b", 0, 2, 2))
    data = torch.tensor([0.5, 0.5, *values]).numpy().tobytes()
    header = encode_payload(torch.zeros(4), "float32").header
    first, second = piece_norms(Payload(header, (data,)), pieces)
    assert first == pytest.approx(0.5**0.5)
    assert math.isfinite(second) is finite


def test_values_whose_squares_overflow_count_as_infinite() -> None:
    (norm,) = piece_norms(encode_payload(torch.full((4,), 1e30), "float32"), one_piece(4))
    assert norm == math.inf


def averaged(model: nn.Module) -> list[str]:
    return [spec.name for spec in Replica(model).specs if spec.rule == "mean"]


class Decoder(nn.Module):
    """As GPT-Neo: token and position embeddings, projections that are linear layers, a head that may be tied.

    `positions` and `vocabulary` may be equal to the hidden size.
    """

    def __init__(
        self, *, vocabulary: int = 101, positions: int = 32, width: int = 32, layers: int = 2, tied: bool = False,
        bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(positions, width)
        self.h = nn.ModuleList()
        for _ in range(layers):
            block = nn.Module()
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                block.add_module(name, nn.Linear(width, width, bias=False))
            block.c_fc, block.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            block.ln = nn.LayerNorm(width)
            self.h.append(block)
        self.lm_head = nn.Linear(width, vocabulary, bias=bias)
        if tied:
            self.lm_head.weight = self.wte.weight


class Asked(Decoder):
    """As models of Hugging Face, which say where their embeddings and their head are."""

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class Encoder(Asked):
    """It has no head, and does not know where its embeddings are."""

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError

    def get_output_embeddings(self) -> nn.Module:
        return None  # type: ignore[return-value]


class Table(nn.Module):
    """An embedding of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(4, 9).weight.detach().clone())


class Says(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding, self.body = embedding, nn.Linear(4, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


HEADLESS = ["wpe.weight", "wte.weight"]
WITH_HEAD = ["lm_head.weight", "wpe.weight", "wte.weight"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(Decoder(), WITH_HEAD, id="as many positions as hidden features"),
        pytest.param(Decoder(bias=True), ["lm_head.bias", *WITH_HEAD], id="the bias of a head"),
        pytest.param(Decoder(positions=64, vocabulary=65), WITH_HEAD, id="fewer positions than words"),
        pytest.param(Decoder(positions=64, vocabulary=63), HEADLESS, id="more positions than words: no evidence"),
        pytest.param(Decoder(tied=True), ["lm_head.weight", "wpe.weight"], id="tied"),
        pytest.param(Decoder(vocabulary=32), HEADLESS, id="as many words as hidden features: no evidence"),
        pytest.param(Decoder(vocabulary=128), HEADLESS, id="as many words as the MLP is wide: no evidence"),
        pytest.param(Decoder(vocabulary=32, tied=True), ["lm_head.weight", "wpe.weight"], id="but tied is evidence"),
        pytest.param(Asked(vocabulary=32), WITH_HEAD, id="and so is what the model says"),
        pytest.param(
            nn.Sequential(nn.Linear(3, 3), Asked(vocabulary=32)), [f"1.{n}" for n in WITH_HEAD], id="a part says"
        ),
        pytest.param(Encoder(), WITH_HEAD, id="if the model does not know, its size tells"),
        pytest.param(Says(Table()), ["embedding.weight"], id="a table of the user's own"),
        pytest.param(Says(nn.Conv2d(3, 4, 2)), [], id="a projection of patches is none"),
        pytest.param(nn.Sequential(Decoder(), nn.Linear(101, 32)), ["0.wpe.weight", "0.wte.weight"], id="reads it"),
    ],
)
def test_embeddings_and_the_head_take_the_mean_and_projections_never_do(model: nn.Module, expected: list[str]) -> None:
    assert averaged(model) == expected
