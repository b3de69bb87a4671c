"""Dtypes of parameters and of what is computed with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from what_works.script import DEVICE, Cases, Script, loop, loss_of, small, usual

CASES = Cases()
HALF_IS_OFF = 4e-3


def in_half(dtype: torch.dtype) -> Script:
    """Steps that are large enough to be seen in so few bits."""
    model = small().to(dtype)
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.03)
    return Script(model, loop(model, optimizer, lambda: loss_of(lambda x: model(x.to(dtype)))), exact=HALF_IS_OFF)


CASES.script("parameters in float32")(lambda: usual(small()))
CASES.script("parameters in bfloat16")(lambda: in_half(torch.bfloat16))
CASES.script("parameters in float16")(lambda: in_half(torch.float16))


@CASES.script("several of these dtypes in one model")
def mixed() -> Script:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(4, 6).bfloat16(), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x.bfloat16()).float())

    model = Mixed()
    return Script(model, loop(model, torch.optim.AdamW(model.parameters(), lr=0.03)), exact=HALF_IS_OFF)


@CASES.script("autocast")
def autocast() -> Script:
    model = small()

    def loss() -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return loss_of(model)

    return Script(model, loop(model, loss=loss))


@CASES.script("GradScaler, with skipped steps")
def scaled() -> Script:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)

    def once(spoil: bool) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if spoil:
            next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        return loss

    def step() -> Tensor:
        once(spoil=True)
        return once(spoil=False)

    return Script(model, step)


def in_float8() -> nn.Module:
    model = small()
    model[0].weight = nn.Parameter(model[0].weight.detach().to(torch.float8_e4m3fn))  # type: ignore[index]
    return model


CASES.joins("parameters in float64", lambda: small().double())
CASES.joins("complex parameters", lambda: small().to(torch.complex64))
CASES.joins("trained parameters in float8", in_float8)


@CASES.script("a frozen base in float64, int8 or float8")
def base() -> Script:
    model = small()
    model.register_parameter("wide", nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False))
    model.register_parameter("whole", nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    model.register_parameter("eight", nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False))
    return usual(model)


@CASES.script("a base quantized by torch.ao, with a trained adapter")
def quantised() -> Script:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.base = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
            self.adapter = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.adapter(self.base(x))

    return usual(Adapted())


@CASES.script("a loss that is not a scalar, or no loss")
def losses() -> Script:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    return Script(model, step)
