"""The text that many models are trained on: the batches of all at once, as `diloco_demo.data.TokenStream` has them."""

from __future__ import annotations

import torch
from torch import Tensor


class Streams:
    """Of each row, windows of one text, in an order of its own."""

    def __init__(self, text: Tensor, starts: Tensor, context: int) -> None:
        """`text`: uint8 [n]. `starts`: where the windows of each row begin, step by step: int32 [R, steps, B]."""
        self._text, self._starts = text, starts
        self._window = torch.arange(context + 1, device=text.device)
        self._taken = torch.zeros(len(starts), dtype=torch.int64, device=text.device)

    def next(self, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the next step of these rows, int64 [R] (None: all): each int64 [R, B, T]."""
        index = torch.arange(len(self._starts), device=self._text.device) if rows is None else rows
        begins = self._starts[index, self._taken[index]]
        self._taken[index] += 1
        windows = self._text[begins[..., None] + self._window].long()
        return windows[..., :-1], windows[..., 1:]
