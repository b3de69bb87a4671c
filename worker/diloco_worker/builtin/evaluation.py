"""Evaluates the built-in model: nats per byte on held-out text, over fixed windows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diloco_common.errors import DataError
from diloco_worker.builtin.gpt import GPT

EVALUATION_TOKENS = 32_768
"""About a second on one CPU core with the default model."""


def evaluate(
    model: GPT, held_out: Tensor, context: int, batch: int = 32, max_tokens: int = EVALUATION_TOKENS,
    tell: Callable[[float], None] = lambda share: None,
) -> float:  # fmt: skip
    """Mean cross-entropy in nats per byte over at most `max_tokens` bytes of `held_out` (uint8 [n]).

    Uses windows of `context` bytes, spread evenly over the text without overlap, and the same ones at every call. Runs
    `batch` windows through the model at once, and tells the share that is done after each. Raises DataError if the text
    is shorter than two bytes.
    """
    if len(held_out) < 2:
        raise DataError("there is no held-out text to evaluate on: give more data")
    context = min(context, len(held_out) - 1)
    fitting = (len(held_out) - 1) // context
    windows = min(fitting, max(1, max_tokens // context))
    starts = torch.arange(windows) * fitting // windows * context
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    done = 0
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for some in torch.split(starts, batch):
            text = held_out[some[:, None] + torch.arange(context + 1)].long().to(device)
            total += model.loss(text[:, :-1], text[:, 1:]).double() * len(some)
            done += len(some)
            tell(done / windows)
    return float(total) / windows
