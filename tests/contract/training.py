"""A user's training loop in small: a tiny model, an inner optimizer, and a learner that joined real shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from in_process import InProcessShard
from torch import Tensor, nn

import diloco_worker
from diloco_worker.global_model import lay_out
from waiting import until

EXACT = {"push": "float32", "pull": "float32", "quorum": 1}
"""Settings of `sync` under which nothing is rounded on the wire."""


def tiny_model(seed: int = 0, width: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def state_of(learner_id: str, inner_step: int = 0, tokens: int = 0) -> dict[str, Any]:
    """What `Learner.state_dict` gave in an earlier process."""
    return {
        "run": "local",
        "learner_id": learner_id,
        "index": 0,
        "inner_step": inner_step,
        "tokens": tokens,
        "tokens_merged": 0,
    }


def global_values(*shards: InProcessShard) -> Tensor:
    """What they hold of the tiny model, in its own order."""
    tensors = {name: torch.empty_like(p) for name, p in tiny_model().named_parameters()}
    for shard in shards:
        for state in shard.loop.look(lambda core=shard.core: list(core.fragments.values())):
            lay_out(state.values.theta, state.fragment, tensors)
    return torch.cat([values.flatten() for values in tensors.values()])


class Training:
    """Joins when made; each `step` is one inner step on `tokens` tokens."""

    def __init__(
        self, shards: str, learner_id: str, *, seed: int = 0, lr: float = 0.05, width: int = 6, **options: Any
    ) -> None:
        self.model = tiny_model(seed, width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.generator = torch.Generator().manual_seed(seed)
        options.setdefault("wait_s", 20.0)
        self.learner = diloco_worker.join(shards, self.model, learner_id=learner_id, **options)

    def step(self, tokens: int = 8, counted: int | None = None) -> None:
        """`counted`: what it says of its tokens."""
        x = torch.randn(tokens, 4, generator=self.generator)
        loss = (self.model(x) - x[:, :2].sin()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.learner.step(tokens=tokens if counted is None else counted, loss=loss)

    def until(self, true: Callable[[], Any], what: str) -> None:
        def stepped() -> Any:
            self.step()
            return true()

        until(stepped, what)

    def values(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    @property
    def connection(self) -> Any:
        (connection,) = self.learner.connections
        return connection

    @property
    def generation(self) -> int:
        return int(self.connection.state.lease.generation)
