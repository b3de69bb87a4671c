"""What is merged by plain mean unless the user says otherwise. The models are built as those that people bring."""

from __future__ import annotations

import pytest
from torch import nn

from diloco_worker.core.replica import Replica


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
