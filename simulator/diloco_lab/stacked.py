"""The built-in models of many learners as one, so that one inner step of all learners is a few large operations.

A row is one learner. A row holds all of its parameters, one after another; the moments of its optimizer have the same
layout. The mathematics is that of `diloco_demo`, row by row: forward, backward, clip, Muon or AdamW, in float32. Only
the order in which sums are rounded differs. It is written out because `torch.func.vmap` loses the fused attention.

Shapes: R rows that step, P parameters of a model, B sequences, T bytes, N = B T.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from diloco_common.settings import TrainSettings
from diloco_demo.gpt import GPT, Layer, norm, rotate
from diloco_demo.muon import RMS_OF_ADAMW, orthogonal
from diloco_demo.shapes import BYTES
from diloco_demo.training import CLIP
from diloco_lab.arms import decays_of
from diloco_worker.core.momentum import Companion, MomentumUse, most_of

ADAMW_EPS = 1e-8
"""The default of torch."""


class Stack:
    def __init__(self, models: Sequence[GPT], train: TrainSettings) -> None:
        """Turn the parameters of `models` into views of the stack. Call this before anything else refers to them."""
        shape = models[0]
        self.theta = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models])
        self.momentum, self._second = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
        """Second moments are zero for parameters trained by Muon."""
        self._steps = torch.zeros(len(models), device=self.theta.device)
        self._train, self._decays, self._rotary = train, decays_of(train), shape.get_buffer("rotary")
        self._layers = [layer for layer in shape.layers if isinstance(layer, Layer)]
        names = {id(p): name for name, p in shape.named_parameters()}
        matrices = shape.hidden_matrices() if train.optimizer == "muon" else []
        self._parts = {names[id(matrix)]: parts for matrix, parts in matrices}
        self._at: dict[str, slice] = {}
        """The place of each parameter in a row."""
        self._sizes = {name: parameter.shape for name, parameter in shape.named_parameters()}
        for name, size in self._sizes.items():
            begin = max((bounds.stop for bounds in self._at.values()), default=0)
            self._at[name] = slice(begin, begin + size.numel())
        for row, model in enumerate(models):
            for name, parameter in model.named_parameters():
                parameter.data = self._view(self.theta, name)[row]

    def begin(self, row: int) -> None:
        """Reset the optimizer state of a row."""
        for values in (self.momentum, self._second, self._steps):
            values[row] = 0.0

    def companions(self, row: int) -> dict[str, Companion]:
        """The first moments of one row's optimizer, by parameter name: views into the stack."""
        decays, found = self._decays, {}
        for name in self._at:
            values = self._view(self.momentum, name)[row]
            if name in self._parts:
                found[name] = Companion("Muon", values, pace=partial(_the, MomentumUse(decays.muon_momentum)))
            else:
                pace = MomentumUse(decays.beta1, most_of(decays.beta1, decays.beta2))
                found[name] = Companion("Adam", values, self._view(self._second, name)[row], partial(_the, pace))
        return found

    def step(self, rows: Tensor | None, inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        """Take an inner step with these rows, int64 [R] (None: all), at these shares of their highest learning rates,
        float32 [R]. Inputs and targets are int64 [R, B, T]. Returns the losses, [R]."""
        values = self.theta if rows is None else self.theta[rows]
        with torch.enable_grad():
            flat = values.detach().requires_grad_()
            losses = self._losses(flat, inputs, targets)
            (gradient,) = torch.autograd.grad(losses.sum(), flat)
        with torch.no_grad():
            self._update(rows, values, gradient, shares)
        return losses.detach()

    # ------------------------------------------------------------ helpers

    def _view(self, flat: Tensor, name: str) -> Tensor:
        return flat[:, self._at[name]].view(len(flat), *self._sizes[name])

    def _losses(self, flat: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each row in nats per byte, [R]."""
        theta = {name: self._view(flat, name) for name in self._at}
        num, batch, length = inputs.shape
        rotary = self._rotary[:length]
        tokens = (inputs + BYTES * torch.arange(num, device=inputs.device)[:, None, None]).view(num, -1)
        x = F.embedding(tokens, theta["embedding.weight"].reshape(num * BYTES, -1))  # [R, N, width]
        for i, layer in enumerate(self._layers):
            at = {name: theta[f"layers.{i}.{name}.weight"] for name in ("qkv", "attention_out", "gate_up", "down")}
            qkv = torch.bmm(norm(x), at["qkv"].mT).view(num * batch, length, 3, layer.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
            x = x + torch.bmm(mixed.transpose(1, 2).reshape(x.shape), at["attention_out"].mT)
            gate, up = torch.bmm(norm(x), at["gate_up"].mT).chunk(2, dim=-1)
            x = x + torch.bmm(F.silu(gate) * up, at["down"].mT)
        logits = torch.bmm(norm(x), theta["lm_head.weight"].mT)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(num, -1).mean(1)

    def _update(self, rows: Tensor | None, values: Tensor, gradient: Tensor, shares: Tensor) -> None:
        """Clip as clip_grad_norm_ does, then step."""
        length = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient.mul_((CLIP / (length + 1e-6)).clamp(max=1.0))
        momentum = self.momentum if rows is None else self.momentum[rows]
        steps = self._steps.add_(1) if rows is None else self._steps[rows] + 1
        self._adamw(rows, values, gradient, momentum, shares[:, None, None], steps[:, None, None])
        self._muon(values, gradient, momentum, shares[:, None, None])
        if rows is not None:
            self.theta[rows], self.momentum[rows], self._steps[rows] = values, momentum, steps

    def _muon(self, values: Tensor, gradient: Tensor, momentum: Tensor, shares: Tensor) -> None:
        """Same as `diloco_demo.muon`."""
        mu, rate = self._decays.muon_momentum, self._train.muon_lr * shares
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, parts in self._parts.items():
            theta, g, m = (self._view(flat, name) for flat in (values, gradient, momentum))
            m.lerp_(g, 1 - mu)
            update = g.lerp(m, mu)
            theta.mul_(1 - rate * self._decays.weight_decay)
            for part, of in zip(theta.chunk(parts, 1), update.chunk(parts, 1), strict=True):
                by_shape[part.shape[1:]].append((part, of))
        for (height, width), pairs in by_shape.items():
            updates = orthogonal(torch.cat([update for _, update in pairs]), exact=True)
            for (part, _), update in zip(pairs, updates.chunk(len(pairs)), strict=True):
                part.sub_(rate * (RMS_OF_ADAMW * max(height, width) ** 0.5) * update)

    def _adamw(
        self, rows: Tensor | None, values: Tensor, gradient: Tensor, momentum: Tensor, shares: Tensor, steps: Tensor
    ) -> None:  # fmt: skip
        """Same as torch.optim.AdamW."""
        train, decays = self._train, self._decays
        rate = train.lr * shares / (1 - decays.beta1**steps)
        root = (1 - decays.beta2**steps).sqrt()
        seconds = self._second if rows is None else self._second[rows]
        for name in self._at.keys() - self._parts.keys():
            theta, g, m, second = (self._view(flat, name) for flat in (values, gradient, momentum, seconds))
            theta.mul_(1 - train.lr * decays.weight_decay * shares)
            m.lerp_(g, 1 - decays.beta1)
            second.mul_(decays.beta2).add_((1 - decays.beta2) * g.square())
            theta.sub_(rate * m / (second.sqrt() / root + ADAMW_EPS))
        if rows is not None:
            self._second[rows] = seconds


def _the(pace: MomentumUse) -> MomentumUse:
    return pace
