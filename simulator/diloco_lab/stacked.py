"""The built-in models of all learners as one, so that an inner step of all is a few large operations.

Every parameter becomes a tensor [learners, rows, columns]; the models that learners hold are views into it. The
mathematics is that of `diloco_demo`, learner by learner: forward, backward, clip, Muon or AdamW. Only the
order in which sums are rounded differs. Written out, because `torch.func.vmap` loses the fused attention.

Shapes: R learners that step, B sequences, T bytes, N = B T.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from diloco_common.settings import TrainSettings
from diloco_demo.gpt import GPT, Layer, norm, rotate
from diloco_demo.muon import RMS_OF_ADAMW, orthogonal
from diloco_demo.shapes import BYTES
from diloco_worker.core.momentum import Companion, Pace
from diloco_worker.shell.companions import most_of

ADAMW_EPS = 1e-8
"""As torch has it."""


class Stack:
    """The models, and the state of their optimizers."""

    def __init__(self, models: Sequence[GPT], train: TrainSettings) -> None:
        """Makes the parameters of `models` views into the stack: before anything else refers to them."""
        self._train = train
        self._shape = models[0]
        self._layers = [layer for layer in models[0].layers if isinstance(layer, Layer)]
        named = [dict(model.named_parameters()) for model in models]
        self._theta = {name: torch.stack([of[name].detach() for of in named]) for name in named[0]}
        for row, of in enumerate(named):
            for name, parameter in of.items():
                parameter.data = self._theta[name][row]
        names = {id(p): name for name, p in named[0].items()}
        matrices = self._shape.hidden_matrices() if train.optimizer == "muon" else []
        self._parts = {names[id(matrix)]: parts for matrix, parts in matrices}
        self._first = {name: torch.zeros_like(theta) for name, theta in self._theta.items()}
        self._second = {n: torch.zeros_like(theta) for n, theta in self._theta.items() if n not in self._parts}
        self._steps = torch.zeros(len(models))

    def step(self, rows: Sequence[int], inputs: Tensor, targets: Tensor, shares: Sequence[float]) -> list[float]:
        """An inner step of these learners at these shares of their highest rates; int64 [R, B, T]. Their losses."""
        index = None if len(rows) == len(self._steps) else torch.tensor(rows)
        theta = {name: _take(values, index).requires_grad_() for name, values in self._theta.items()}
        losses = self._losses(theta, inputs, targets)
        gradients = dict(zip(theta, torch.autograd.grad(losses.sum(), list(theta.values())), strict=True))
        with torch.no_grad():
            _clip(gradients.values(), self._train.clip)
            first = {name: _take(values, index) for name, values in self._first.items()}
            second = {name: _take(values, index) for name, values in self._second.items()}
            steps = _take(self._steps, index).add_(1)
            share = torch.tensor(shares)[:, None, None]
            theta = {name: values.detach() for name, values in theta.items()}
            self._muon(theta, gradients, first, share)
            self._adamw(theta, gradients, first, second, share, steps[:, None, None])
            if index is not None:
                for whole, part in ((self._theta, theta), (self._first, first), (self._second, second)):
                    for name, values in part.items():
                        whole[name][index] = values
                self._steps[index] = steps
        found: list[float] = losses.detach().tolist()
        return found

    def begin(self, row: int) -> None:
        """The state of one learner's optimizer begins again."""
        for values in (*self._first.values(), *self._second.values()):
            values[row].zero_()
        self._steps[row] = 0

    def companions(self, row: int) -> dict[str, Companion]:
        """The first moments of one learner's optimizer, by name of the parameter: views into the stack."""
        train = self._train
        muon, adamw = Pace(train.muon_momentum), Pace(train.beta1, most_of(train.beta1, train.beta2))
        return {
            name: Companion("Adam", first[row], self._second[name][row], lambda: adamw)
            if name in self._second
            else Companion("Muon", first[row], pace=lambda: muon)
            for name, first in self._first.items()
        }

    def _losses(self, theta: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Of each learner, in nats per byte: [R]."""
        num, batch, length = inputs.shape
        rotary = self._shape.get_buffer("rotary")[:length]
        tokens = (inputs + BYTES * torch.arange(num)[:, None, None]).view(num, -1)
        x = F.embedding(tokens, theta["embedding.weight"].flatten(0, 1))  # [R, N, width]
        for i, layer in enumerate(self._layers):
            at = {name: theta[f"layers.{i}.{name}.weight"] for name in ("qkv", "attention_out", "gate_up", "down")}
            qkv = torch.bmm(norm(x), at["qkv"].mT).view(num * batch, length, 3, layer.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
            x = x + torch.bmm(mixed.transpose(1, 2).reshape(x.shape), at["attention_out"].mT)
            gate, up = torch.bmm(norm(x), at["gate_up"].mT).chunk(2, dim=-1)
            x = x + torch.bmm(F.silu(gate) * up, at["down"].mT)
        logits = torch.bmm(norm(x), theta["lm_head.weight"].mT)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(num, -1).mean(1)

    def _muon(
        self, theta: dict[str, Tensor], gradients: dict[str, Tensor], first: dict[str, Tensor], share: Tensor
    ) -> None:
        """As `diloco_demo.muon`."""
        train = self._train
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, parts in self._parts.items():
            momentum = first[name].lerp_(gradients[name], 1 - train.muon_momentum)
            update = gradients[name].lerp(momentum, train.muon_momentum)
            theta[name].mul_(1 - train.muon_lr * train.weight_decay * share)
            for part, of in zip(theta[name].chunk(parts, 1), update.chunk(parts, 1), strict=True):
                by_shape[part.shape].append((part, of))
        for (_, height, width), pairs in by_shape.items():
            updates = orthogonal(torch.cat([update for _, update in pairs]))
            rate = train.muon_lr * RMS_OF_ADAMW * max(height, width) ** 0.5 * share
            for (part, _), update in zip(pairs, updates.chunk(len(pairs)), strict=True):
                part.sub_(rate * update)

    def _adamw(
        self, theta: dict[str, Tensor], gradients: dict[str, Tensor], first: dict[str, Tensor],
        second: dict[str, Tensor], share: Tensor, steps: Tensor,
    ) -> None:  # fmt: skip
        """As torch.optim.AdamW."""
        train = self._train
        rate = train.lr * share / (1 - train.beta1**steps)
        root = (1 - train.beta2**steps).sqrt()
        for name, b in second.items():
            gradient, a = gradients[name], first[name]
            theta[name].mul_(1 - train.lr * train.weight_decay * share)
            a.lerp_(gradient, 1 - train.beta1)
            b.mul_(train.beta2).addcmul_(gradient, gradient, value=1 - train.beta2)
            theta[name].sub_(rate * a / (b.sqrt() / root + ADAMW_EPS))


def _take(values: Tensor, index: Tensor | None) -> Tensor:
    """Those rows, copied; all of them in place."""
    return values.detach() if index is None else values[index]


def _clip(gradients: Collection[Tensor], norm_max: float) -> None:
    """As clip_grad_norm_, learner by learner."""
    length = torch.stack([torch.linalg.vector_norm(g, dim=(1, 2)) for g in gradients]).norm(dim=0)
    factor = (norm_max / (length + 1e-6)).clamp(max=1.0)[:, None, None]
    for gradient in gradients:
        gradient.mul_(factor)
