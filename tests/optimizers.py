"""Optimizers that step on copies of the weights, as others' packages have them: masters, Lookahead, schedule-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SGD: Make = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
ADAMW: Make = partial(torch.optim.AdamW, lr=0.01)


class OnMasters:
    """Steps on float32 copies, and writes them over the parameters, as apex and others do."""

    def __init__(self, parameters: Iterable[nn.Parameter], make: Make = ADAMW) -> None:
        self.parameters = list(parameters)
        self.copies = [nn.Parameter(p.detach().float().clone()) for p in self.parameters]
        self.inner = make(self.copies)
        self.state: dict[object, object] = {}
        self.param_groups, self.param_groups_master = [{"params": self.parameters}], [{"params": self.copies}]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            parameter.copy_(copy)


class Lookahead:
    """Every k steps, slow weights go half of the way to the fast ones, and these back to them."""

    def __init__(self, parameters: Iterable[nn.Parameter], make: Make = ADAMW, k: int = 5) -> None:
        self.inner, self.k, self.count = make(list(parameters)), k, 0
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        if not self.count:
            self.slow = {p: p.clone() for p in self.parameters()}
        self.inner.step()
        for p in self.parameters():
            self.state[p]["slow_param"] = self.slow[p]
        self.count += 1
        if self.count % self.k == 0:
            for p in self.parameters():
                p.copy_(self.slow[p].lerp_(p, 0.5))

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])


class ScheduleFree(torch.optim.Optimizer):
    """SGD that keeps z and x, and writes y, between them, over the parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr})
        self.count = 0

    def train(self) -> None:
        """As the published one: it makes an empty state of each parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].get("z")

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"z": p.clone(), "x": p.clone()}
                z, x = state["z"], state["x"]
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / self.count)
                p.copy_(x.lerp(z, 0.1))
