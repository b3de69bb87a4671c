"""Models: what they are made of, and what is handed to `join` in their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from what_works.script import DEVICE, RATE, Cases, Ground, Script, X, Y, loop, loss_of, small, usual

CASES = Cases()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@CASES.script("a convolutional network")
def convolutional() -> Script:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    images = X.reshape(8, 1, 2, 2)
    return Script(model, loop(model, loss=lambda: (model(images) - Y).square().mean()))


@CASES.script("an LSTM or GRU with packed weights")
def recurrent() -> Script:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5, num_layers=2), nn.Linear(5, 2)
            self.lstm.flatten_parameters()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    model = seeded(Recurrent)
    return Script(model, loop(model, torch.optim.Adam(model.parameters(), lr=RATE)))


@CASES.script("torch's Transformer, with dropout")
def transformer() -> Script:
    model = seeded(partial(nn.TransformerEncoderLayer, 4, 2, 8))
    words = X.reshape(8, 1, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return Script(model, loop(model, optimizer, lambda: (model(words)[:, 0, :2] - Y).square().mean()))


@CASES.script("embeddings tied to the head")
def tied() -> Script:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.words.weight

        def forward(self, rows: Tensor) -> Tensor:
            return self.head(self.words(rows))

    model, rows = seeded(Tied), torch.arange(7)
    return Script(model, loop(model, loss=lambda: nn.functional.cross_entropy(model(rows), rows.roll(1))))


@CASES.script("a layer used in several places")
def reused() -> Script:
    layer = seeded(partial(nn.Linear, 4, 4))
    return usual(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 2)))


@CASES.script("LayerNorm, GroupNorm and others without statistics")
def norms() -> Script:
    model = small()
    model[1] = nn.Sequential(nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6))
    return Script(model, loop(model, torch.optim.Adam(model.parameters(), lr=RATE)))


@CASES.script("BatchNorm and others with running statistics")
def statistics() -> Script:
    return usual(small().insert(1, nn.BatchNorm1d(6).to(DEVICE)), is_whole=True)


class Queued(nn.Module):
    """A layer with buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.register_buffer("queue", torch.randn(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.queue = self.queue.roll(1)
        self.seen += 1
        return self.layer(x) * self.mask


CASES.script("other buffers: codebooks, counters, masks, caches")(lambda: usual(Queued(), is_whole=True))


CASES.script('buffers of this learner\'s own, with private=["queue"]')(
    lambda: usual(Queued(), options={"private": ["queue"]})
)


def with_infinities() -> nn.Module:
    model = small()
    model.register_buffer("bias", torch.tensor([0.0, -torch.inf]))
    return model


CASES.joins("a persistent buffer with infinities", with_infinities)


@CASES.script("a mixture of experts, some without a gradient in a step")
def experts() -> Script:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[1](x)

    model = seeded(Mixture)
    return Script(model, loop(model, torch.optim.AdamW(model.parameters(), lr=RATE)))


@CASES.script("LoRA and other adapters on a frozen base")
def adapters() -> Script:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 2).requires_grad_(False)
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = seeded(Adapter)
    return Script(model, loop(model, torch.optim.AdamW(model.parameters(), lr=RATE)))


def on_a_frozen_base(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))


@CASES("another frozen base than the first learner's")
def another_base(ground: Ground) -> None:
    with ground.learner(on_a_frozen_base(0), "first"), ground.learner(on_a_frozen_base(1), "script"):
        pass


CASES.script('another frozen base, with frozen="any"')(
    lambda: usual(on_a_frozen_base(0), options={"frozen": "any"}, plain=partial(on_a_frozen_base, 1))
)


@CASES("another model than the first learner's")
def another_model(ground: Ground) -> None:
    with ground.learner(small(), "first"), ground.learner(nn.Linear(4, 2), "script"):
        pass


CASES.script('heads of this learner\'s own, with private=["2.*"]')(lambda: usual(small(), options={"private": ["2.*"]}))


def several(models: Callable[[nn.Module, nn.Module], Any]) -> Script:
    body, head = whole = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    return Script(models(body, head), loop(whole))


CASES.script("a list of models")(lambda: several(lambda body, head: [body, head]))
CASES.script("a dict of models")(lambda: several(lambda body, head: {"actor": body, "critic": head}))


@CASES.script("models that share a part")
def sharing() -> Script:
    torch.manual_seed(0)
    body = nn.Linear(4, 3)
    actor, critic = nn.Sequential(body, nn.Linear(3, 2)), nn.Sequential(body, nn.Linear(3, 2))
    optimizer = torch.optim.SGD({*actor.parameters(), *critic.parameters()}, RATE)
    both = nn.ModuleList([actor, critic])
    return Script([actor, critic], loop(both, optimizer, lambda: loss_of(actor) + loss_of(critic)))


CASES.joins("model.parameters(), an optimizer, None", lambda: small().parameters())
CASES.joins("a model without trained parameters", lambda: small().requires_grad_(False))
CASES.joins("a lazy module before its first batch", partial(nn.LazyLinear, 2))


@CASES.script("a lazy module after its first batch")
def no_longer_lazy() -> Script:
    torch.manual_seed(0)
    model = nn.LazyLinear(2)
    model(X)
    return usual(model)


CASES.joins("a model on the meta device", lambda: nn.Linear(4, 2, device="meta"))


def not_finite() -> nn.Module:
    model = small()
    nn.init.constant_(next(model.parameters()), torch.nan)
    return model


CASES.joins("a model with NaN", not_finite)
