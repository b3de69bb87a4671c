"""Streaming DiLoCo in one process, written straight from the formulas, to hold the real thing against."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import dumb_merge
import torch
from torch import Tensor

from builders import TinyText, inner_step

Part = tuple[str, int, int]
"""Parameter name, first and last + 1 element."""


def dumb_diloco(
    start: TinyText, parts_of: Sequence[Sequence[Part]], batch: Callable[[int, int], Tensor], *,
    learners: int, steps: int, sync_every: int, rule: str, lr: float, momentum: float,
) -> list[TinyText]:  # fmt: skip
    """Fragment p holds `parts_of[p]`, and is synchronised first after ceil((t + 1) H / P) steps, then every H.

    Its turn t is p s mod P, where s is coprime with P, and nearest to 0.3 P.
    """
    count = len(parts_of)
    stride = sorted(range(1, count + 1), key=lambda s: (math.gcd(s, count), abs(s - 0.3 * count)))[0]
    models = [copy.deepcopy(start) for _ in range(learners)]
    inner = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    thetas = [[look(start, part).clone() for part in parts] for parts in parts_of]
    outer = [torch.optim.SGD(t, lr=lr, momentum=momentum, nesterov=momentum > 0) for t in thetas]
    for t in range(1, steps + 1):
        for m, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            inner_step(model, optimizer, batch(m, t))
        for p, parts in enumerate(parts_of):
            first = math.ceil((p * stride % count + 1) * sync_every / count)
            if t >= first and (t - first) % sync_every == 0:
                for theta, part in zip(thetas[p], parts, strict=True):
                    deltas = [theta.double() - look(model, part).double() for model in models]
                    theta.grad = average(deltas, rule, part[0]).float()
                outer[p].step()
                for theta, part in zip(thetas[p], parts, strict=True):
                    for model in models:
                        look(model, part).copy_(theta)
    return models


def look(model: TinyText, part: Part) -> Tensor:
    name, first, end = part
    return dict(model.named_parameters())[name].detach().view(-1)[first:end]


def average(vectors: Sequence[Tensor], rule: str, name: str) -> Tensor:
    """Of equal tokens and steps, in float64."""
    sent = [(v, 1, 1) for v in vectors]
    is_mean = rule == "mean" or name.startswith(("embedding", "head"))
    return dumb_merge.published("mean" if is_mean else "rda", sent)
