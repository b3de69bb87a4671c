"""Muon (K. Jordan et al., 2024) for hidden matrices, and AdamW for everything else.

    m <- mu m + (1 - mu) g;   u = 0.2 sqrt(max(rows, columns)) orthogonal((1 - mu) g + mu m)
    theta <- theta - lr (u + decay theta)

`orthogonal` sets all singular values to about 1, by five Newton-Schulz steps. The factor gives the update AdamW's root
mean square (arXiv 2502.16982), so both take the same learning rate. A matrix that fuses several, such as query, key and
value, is split for this. `torch.optim.Muon` does not split, and processes one matrix at a time. Here matrices of one
shape are multiplied in one batch, which is faster if they are small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diloco_common.wire.manifest import Momentum

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of a Newton-Schulz step: they raise small singular values fastest."""
NEWTON_SCHULZ_STEPS = 5
RMS_OF_ADAMW = 0.2
"""Root mean square of the elements of a typical AdamW update, divided by its learning rate."""


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer for all parameters of a model. A matrix's state is `momentum_buffer`, float32 like the matrix."""

    def __init__(
        self, matrices: Sequence[tuple[nn.Parameter, int]], others: Sequence[Mapping[str, Any]], *,
        lr: float, momentum: float, weight_decay: float, betas: tuple[float, float],
    ) -> None:  # fmt: skip
        """`matrices`: each with the number of equal parts fused along its rows. `others`: groups for AdamW."""
        fused: dict[int, list[nn.Parameter]] = defaultdict(list)
        for matrix, parts in matrices:
            fused[parts].append(matrix)
        muon = [
            {"params": of, "parts": parts, "momentum": momentum, "weight_decay": weight_decay, "lr_highest": lr}
            for parts, of in sorted(fused.items())
        ]
        self._adamw = torch.optim.AdamW(list(map(dict, others)), lr=lr, betas=betas, fused=True)
        super().__init__([*muon, *self._adamw.param_groups], {"lr": lr})
        self._share()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of both optimizers. Parameters without a gradient stay as they are."""
        assert closure is None
        self._adamw.step()
        for group in self.param_groups:
            if "parts" in group:
                self._step(group)

    def kind_of_momentum(self, group: Mapping[str, Any]) -> Momentum:
        """The kind of a group's momentum, for `join(companions=)`."""
        return "Adam" if "betas" in group else "Muon"

    def _share(self) -> None:
        """Make AdamW use this optimizer's state and groups."""
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if "parts" not in group]

    def _step(self, group: dict[str, Any]) -> None:
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(momentum, group["momentum"])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            for part, of in zip(parameter.chunk(group["parts"]), update.chunk(group["parts"]), strict=True):
                by_shape[tuple(part.shape)].append((part, of))
        for (rows, columns), pairs in by_shape.items():
            updates = orthogonal(torch.stack([update for _, update in pairs]))
            rate = group["lr"] * RMS_OF_ADAMW * max(rows, columns) ** 0.5
            for (part, _), update in zip(pairs, updates, strict=True):
                part.add_(update, alpha=-rate)


def orthogonal(matrices: Tensor, *, exact: bool = False) -> Tensor:
    """U V^T of each matrix U S V^T, approximately: singular values between 0.7 and 1.2. Floating point [n, rows,
    columns].

    Uses bfloat16 on an accelerator, and float32 on a CPU, where bfloat16 products may be slower. `exact`: float32
    everywhere.
    """
    x = matrices if exact or matrices.device.type == "cpu" else matrices.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).type_as(matrices)
