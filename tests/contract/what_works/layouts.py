"""How parameters lie in memory, and who holds them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from what_works.script import DEVICE, RATE, Cases, Script, Y, loop, small, usual

CASES = Cases()


class Own(nn.Module):
    """A layer with a weight of the author's own making."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)


CASES.script("contiguous")(lambda: usual(small()))


@CASES.script("a single number (shape []), and empty ones")
def numbers() -> Script:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x[:, :2] + self.nothing.sum()

    torch.manual_seed(0)
    return usual(nn.Sequential(nn.Linear(4, 3), Scaled()))


@CASES.script("ParameterList and ParameterDict")
def lists() -> Script:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ParameterList([drawn(4, 3), drawn(3, 2)])
            self.named = nn.ParameterDict({"shift": drawn(2)})

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.each[0] @ self.each[1] + self.named["shift"]

    model = Listed()
    return Script(model, loop(model, torch.optim.Adam(model.parameters(), lr=RATE)))


@CASES.script("two Parameters in the same memory (a.data = b.data)")
def same_memory() -> Script:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
        model[1].weight.data = model[0].weight.data
        return model

    return usual(made(), plain=made)


def overlapping() -> nn.Module:
    memory = drawn(24)
    return nn.Sequential(Own(memory[:16].view(4, 4)), Own(memory[12:20].view(4, 2)))


CASES.joins("parameters that overlap partly", overlapping)


@CASES.script("channels_last")
def channels_last() -> Script:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 2), nn.Flatten()).to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = drawn(8, 2, 2, 2)
    return Script(model, loop(model, loss=lambda: (model(images) - Y).square().mean()))


CASES.script("a transposed weight")(lambda: usual(Own(drawn(2, 4).t())))
CASES.joins("an expanded weight (one number in several places)", lambda: Own(drawn(1, 2).expand(4, 2)))
CASES.joins("a weight with gaps between its numbers", lambda: Own(drawn(4, 4)[:, :2]))
CASES.joins("a sparse parameter", lambda: Own(drawn(4, 2).to_sparse()))


CASES.joins(
    "trained parameters on several devices", lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, device="meta"))
)


CASES.script("memory shared by processes (share_memory) before join")(lambda: usual(small().share_memory()))
