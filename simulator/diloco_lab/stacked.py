"""The built-in models of many learners as one, so that an inner step of all of them is a few large operations.

A row is one learner of one run. Rows differ in their data, their seed and their rates; shapes and the kind of optimizer
are those of all. All parameters of a row lie behind each other in one flat row, as do the moments of its optimizer. The
mathematics is that of `diloco_demo`, row by row: forward, backward, clip, Muon or AdamW, in float32. Only the order
in which sums are rounded differs. Written out, because `torch.func.vmap` loses the fused attention. On a CPU,
`native.py` does it in C, if it can.

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
from diloco_lab import native
from diloco_worker.core.momentum import Companion, Pace
from diloco_worker.shell.companions import most_of

ADAMW_EPS = 1e-8
"""As torch has it."""
ROWS_AT_ONCE = 4096
"""Sequences that are evaluated at once, over all rows."""


class Stack:
    """The models, and the state of their optimizers."""

    def __init__(self, shape: GPT, trains: Sequence[TrainSettings], theta: Tensor) -> None:
        """`trains`: of each row. `theta`: the values that each begins with, float32 [R, P], in the order of the
        parameters of `shape`. They are trained in place."""
        self.theta = theta
        self.momentum = torch.zeros_like(theta)
        self._context, self._rotary = shape.context, shape.get_buffer("rotary").to(theta.device)
        self._layers = [layer for layer in shape.layers if isinstance(layer, Layer)]
        names = {id(p): name for name, p in shape.named_parameters()}
        matrices = shape.hidden_matrices() if trains[0].optimizer == "muon" else []
        self._parts = {names[id(matrix)]: parts for matrix, parts in matrices}
        self.at: dict[str, slice] = {}
        """Where each parameter lies in a row."""
        self._sizes = {name: parameter.shape for name, parameter in shape.named_parameters()}
        for name, size in self._sizes.items():
            begin = max((bounds.stop for bounds in self.at.values()), default=0)
            self.at[name] = slice(begin, begin + size.numel())
        self._second = torch.zeros_like(theta)
        """Second moments. Zero where Muon steps."""
        self._steps = torch.zeros(len(theta), device=theta.device)
        self._set = {
            field: torch.tensor([float(getattr(train, field)) for train in trains], device=theta.device)
            for field in native.RATES
        }
        width, device = shape.embedding.embedding_dim, theta.device
        found = native.find_for(shape.context, width) if theta.is_cpu else f"torch has the models on {device}"
        self._kernel = None if isinstance(found, str) else native.Kernel(found, shape, trains[0].optimizer == "muon")

    @classmethod
    def of(cls, models: Sequence[GPT], train: TrainSettings) -> Stack:
        """Makes the parameters of `models` views into the stack: before anything else refers to them."""
        rows = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
        stack = cls(models[0], [train] * len(models), torch.stack(rows))
        for row, model in enumerate(models):
            for name, parameter in model.named_parameters():
                parameter.data = stack._view(stack.theta, name)[row]
        return stack

    @property
    def stepped_by(self) -> str:
        """Who does inner steps: "C" or "torch"."""
        return "torch" if self._kernel is None else "C"

    def begin(self, rows: slice) -> None:
        """The state of their optimizers begins again."""
        for values in (self.momentum, self._second, self._steps):
            values[rows] = 0.0

    def bound(self, name: str, rows: slice) -> Tensor | None:
        """How large elements of the momentum of a parameter may be: flat [R, n]; None where nothing divides it."""
        if name in self._parts:
            return None
        beta1, beta2 = (self._set[field][rows].double() for field in ("beta1", "beta2"))
        most = (1 - beta1) / ((1 - beta2) * (1 - beta1**2 / beta2)).sqrt()
        return self._second[rows, self.at[name]].sqrt() * most.float()[:, None]

    def keeps(self, name: str, rows: slice) -> Tensor:
        """What an inner step keeps of the momentum of a parameter: [R]."""
        return self._set["muon_momentum" if name in self._parts else "beta1"][rows]

    def companions(self, row: int) -> dict[str, Companion]:
        """The first moments of one row's optimizer, by name of the parameter: views into the stack."""
        mu, beta1, beta2 = (float(self._set[field][row]) for field in ("muon_momentum", "beta1", "beta2"))
        found = {}
        for name in self.at:
            values = self._view(self.momentum, name)[row]
            if name in self._parts:
                found[name] = Companion("Muon", values, pace=partial(_the, Pace(mu)))
            else:
                pace, second = Pace(beta1, most_of(beta1, beta2)), self._view(self._second, name)[row]
                found[name] = Companion("Adam", values, second, partial(_the, pace))
        return found

    def step(self, rows: Tensor | None, inputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        """An inner step of these rows, int64 [R] (None: all), at these shares of their highest rates, float32 [R].
        Inputs and targets are int64 [R, B, T]. Returns their losses, [R]."""
        if (kernel := self._kernel_for(inputs)) is not None:
            return self._native_step(kernel, rows, inputs, targets, shares)
        values = self.theta if rows is None else self.theta[rows]
        with torch.enable_grad():
            flat = values.detach().requires_grad_()
            losses = self._losses(flat, inputs, targets)
            (gradient,) = torch.autograd.grad(losses.sum(), flat)
        with torch.no_grad():
            self._update(rows, values, gradient, shares)
        return losses.detach()

    @torch.no_grad()
    def evaluate(self, theta: Tensor, text: Tensor, tokens: int) -> Tensor:
        """Mean loss of each row of theta, float32 [runs, P], as `diloco_demo.gpt.evaluate` has it: float64 [runs]."""
        context = min(self._context, len(text) - 1)
        fitting = (len(text) - 1) // context
        windows = min(fitting, max(1, tokens // context))
        starts = torch.arange(windows, device=text.device) * fitting // windows * context
        total = torch.zeros(len(theta), dtype=torch.float64, device=theta.device)
        for some in torch.split(starts, max(1, ROWS_AT_ONCE // len(theta))):
            read = text[some[:, None] + torch.arange(context + 1, device=text.device)].long()
            read = read.expand(len(theta), *read.shape)
            kernel = self._kernel_for(read[..., 1:])
            losses = self._losses if kernel is None else kernel.losses
            total += losses(theta, read[..., :-1], read[..., 1:]).double() * len(some)
        return total / windows

    # ------------------------------------------------------------ helpers

    def _kernel_for(self, inputs: Tensor) -> native.Kernel | None:
        return self._kernel if self._kernel is not None and self._kernel.fits(inputs) else None

    def _native_step(
        self, kernel: native.Kernel, rows: Tensor | None, inputs: Tensor, targets: Tensor, shares: Tensor
    ) -> Tensor:  # fmt: skip
        which = torch.arange(len(self.theta)) if rows is None else rows
        self._steps[which] += 1
        rates = [*(self._set[name][which] for name in native.RATES), shares, self._steps[which]]
        state = self.theta, self.momentum, self._second
        return kernel.step(which, inputs, targets, state, torch.stack(rates, 1))

    def _view(self, flat: Tensor, name: str) -> Tensor:
        return flat[:, self.at[name]].view(len(flat), *self._sizes[name])

    def _losses(self, flat: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of each row, in nats per byte: [R]."""
        theta = {name: self._view(flat, name) for name in self.at}
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
        """Clip as clip_grad_norm_, then step."""
        length = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient.mul_((self._of("clip", rows)[:, None] / (length + 1e-6)).clamp(max=1.0))
        momentum = self.momentum if rows is None else self.momentum[rows]
        steps = self._steps.add_(1) if rows is None else self._steps[rows] + 1
        self._adamw(rows, values, gradient, momentum, shares, steps)
        self._muon(rows, values, gradient, momentum, shares)
        if rows is not None:
            self.theta[rows], self.momentum[rows], self._steps[rows] = values, momentum, steps

    def _of(self, field: str, rows: Tensor | None) -> Tensor:
        return self._set[field] if rows is None else self._set[field][rows]

    def _muon(
        self, rows: Tensor | None, values: Tensor, gradient: Tensor, momentum: Tensor, shares: Tensor
    ) -> None:  # fmt: skip
        """As `diloco_demo.muon`."""
        mu = self._of("muon_momentum", rows)[:, None, None]
        rate = (self._of("muon_lr", rows) * shares)[:, None, None]
        decay = 1 - rate * self._of("weight_decay", rows)[:, None, None]
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, parts in self._parts.items():
            theta, g, m = (self._view(flat, name) for flat in (values, gradient, momentum))
            m.lerp_(g, 1 - mu)
            update = g.lerp(m, mu)
            theta.mul_(decay)
            for part, of in zip(theta.chunk(parts, 1), update.chunk(parts, 1), strict=True):
                by_shape[part.shape[1:]].append((part, of))
        for (height, width), pairs in by_shape.items():
            updates = orthogonal(torch.cat([update for _, update in pairs]), exact=True)
            for (part, _), update in zip(pairs, updates.chunk(len(pairs)), strict=True):
                part.sub_(rate * (RMS_OF_ADAMW * max(height, width) ** 0.5) * update)

    def _adamw(
        self, rows: Tensor | None, values: Tensor, gradient: Tensor, momentum: Tensor, shares: Tensor, steps: Tensor
    ) -> None:  # fmt: skip
        """As torch.optim.AdamW."""
        lr, beta1, beta2, decay = (self._of(f, rows)[:, None, None] for f in ("lr", "beta1", "beta2", "weight_decay"))
        share, count = shares[:, None, None], steps[:, None, None]
        rate = lr * share / (1 - beta1**count)
        root = (1 - beta2**count).sqrt()
        seconds = self._second if rows is None else self._second[rows]
        for name in self.at.keys() - self._parts.keys():
            theta, g, m, second = (self._view(flat, name) for flat in (values, gradient, momentum, seconds))
            theta.mul_(1 - lr * decay * share)
            m.lerp_(g, 1 - beta1)
            second.mul_(beta2).add_((1 - beta2) * g.square())
            theta.sub_(rate * m / (second.sqrt() / root + ADAMW_EPS))
        if rows is not None:
            self._second[rows] = seconds


def _the(pace: Pace) -> Pace:
    return pace
