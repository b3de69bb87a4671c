"""Going on from a trained model: a GPT that has learnt Python goes on with C++, wholly or with an adapter (LoRA).

    PYTHONPATH=benchmarks diloco lab compare benchmarks/continuing/*_full.toml --model continuing:full --seeds 3 \\
        --out benchmarks/results/quality_continuing.jsonl
    ... benchmarks/continuing/*_adapter.toml --model continuing:adapter ...

The text is that of the C++ headers of a Debian machine with g++ (`data.source` of the arms). The trained model is made
once for each shape, in a minute, and kept in the folder for temporary files.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco_common.settings import Settings
from diloco_demo.data import STDLIB, TokenStream
from diloco_demo.gpt import GPT, build_gpt
from diloco_lab.tasks import BuiltIn, corpus_of, inner_step

STEPS, BATCH, RATE = 4000, 32, 6e-3
"""Of the training on Python: AdamW, a rate that falls to zero."""
RANK, SCALE = 4, 2.0
"""Of the adapter: W x + SCALE B A x."""


def full(settings: Settings, non_iid: float) -> BuiltIn:
    return Continued(settings, non_iid)


def adapter(settings: Settings, non_iid: float) -> BuiltIn:
    return Adapted(settings, non_iid)


class Continued(BuiltIn):
    """All parameters go on."""

    def model(self) -> nn.Module:
        model = build_gpt(self.settings.model, seed=0)
        model.load_state_dict(torch.load(_trained(self.settings)))
        return model


class Adapted(Continued):
    """The trained values stay as they are; each matrix of the layers has a small one beside it."""

    def model(self) -> nn.Module:
        model = super().model().requires_grad_(False)
        chance = torch.Generator().manual_seed(self.settings.run.seed)
        assert isinstance(model, GPT)
        for layer in model.layers:
            for name, linear in [*layer.named_children()]:
                assert isinstance(linear, nn.Linear)
                setattr(layer, name, LowRank(linear, chance))
        return model


class LowRank(nn.Module):
    """A frozen matrix with an adapter. As published (arXiv 2106.09685), B begins at zero."""

    def __init__(self, frozen: nn.Linear, chance: torch.Generator) -> None:
        super().__init__()
        self.frozen = frozen
        a = torch.randn(RANK, frozen.in_features, generator=chance) / frozen.in_features**0.5
        self.a, self.b = nn.Parameter(a), nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + SCALE * F.linear(F.linear(x, self.a), self.b)
        return y


def _trained(settings: Settings) -> Path:
    """The values of the model that has learnt Python."""
    shape = settings.model.model_dump_json()
    name = hashlib.sha256(f"{shape} {STEPS} {BATCH} {RATE}".encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir(), f"diloco-continuing-{name}.pt")
    if path.exists():
        return path
    model = build_gpt(settings.model, seed=0)
    before = settings.model_copy(update={"data": settings.data.model_copy(update={"source": STDLIB})})
    task, text = BuiltIn(before), corpus_of(before).train
    stream = TokenStream(text, learner_id="before", seed=0, context=settings.model.context, batch=BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(STEPS):
        inner_step(task, model, optimizer, *stream.next_batch(), share=1 - step / STEPS, clip=1.0)
    half = path.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), half)
    os.replace(half, path)
    return path
