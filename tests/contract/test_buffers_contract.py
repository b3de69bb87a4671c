"""Models with buffers, and with frozen bases, as learners of a real run: what is pulled and finished with is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_process import settings_with
from safetensors.torch import load_file
from torch import Tensor, nn

import diloco_worker
from diloco_common.command import main
from diloco_worker.learner import Learner
from waiting import until

EXACT = {"push": "float32", "pull": "float32", "fragments": 2}


class Net(nn.Module):
    """Statistics, a counter, indices, and a queue that is local."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.register_buffer("order", torch.tensor([3, 1, 2, 0]))
        self.register_buffer("queue", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.queue.copy_(x.detach()[:2, 0])
        return self.last(self.norm(self.first(x[:, self.order])))


class Run:
    """A learner of its own data, stepped by hand."""

    def __init__(self, shards: str, learner_id: str, shift: float = 0.0, **options: Any) -> None:
        self.model, self.shift = Net(), shift
        self.generator = torch.Generator().manual_seed(ord(learner_id[0]))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        options = {"private": "queue", "wait_s": 20.0} | options
        self.learner: Learner = diloco_worker.join(shards, self.model, learner_id=learner_id, **options)

    def batch(self) -> Tensor:
        return torch.randn(64, 4, generator=self.generator) + self.shift

    def step(self) -> None:
        self.model(self.batch()).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.learner.step(samples=64)


@pytest.fixture
def shards(serve) -> list[Any]:
    return [serve(settings_with(run={"tokens": 6400}, sync=EXACT, shard={"index": i, "count": 2})) for i in range(2)]


def test_what_is_pulled_and_finished_with_loads_strictly_and_is_the_same_everywhere(shards, tmp_path) -> None:
    addresses = ",".join(shard.address for shard in shards)
    runs = [Run(addresses, "a", shift=-1.0), Run(addresses, "b", shift=1.0)]
    while not all(run.learner.done for run in runs):
        for run in runs:
            if not run.learner.done:
                run.step()
    local = [run.model.queue.clone() for run in runs]
    for run in runs:
        assert run.learner.finish()
    assert main(["pull", "--shards", addresses, "--out", str(tmp_path), "--partial"]) == 0

    states = [run.model.state_dict() for run in runs]
    pulled = load_file(tmp_path / "model.safetensors")
    assert pulled.keys() == states[0].keys() - {"queue"}
    for name, values in pulled.items():
        assert values.dtype == states[0][name].dtype, name
        for state in states:
            assert torch.equal(state[name], values), name
    for state, queue in zip(states, local, strict=True):
        assert torch.equal(state["queue"], queue), "what is private stays"
    assert Net().load_state_dict(pulled | {"queue": torch.zeros(2)}).missing_keys == []

    means, within = zip(*(activations(run) for run in runs), strict=True)
    apart = means[1] - means[0]
    share = float((pulled["norm.running_mean"] - means[0]) @ apart / (apart @ apart))
    assert 0.1 < share < 0.9, "of the data of both, in whatever proportion they took part"
    mean = (1 - share) * means[0] + share * means[1]
    var = (1 - share) * within[0] + share * within[1] + share * (1 - share) * apart.square()
    assert torch.allclose(pulled["norm.running_mean"], mean, atol=0.2)
    assert torch.allclose(pulled["norm.running_var"], var, rtol=0.3, atol=0.1), "and no mean of variances"


class Codebook(nn.Module):
    """Vectors that follow the data, as VQ keeps them: a buffer, not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("embedding", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.embedding.lerp_(x.detach()[:3], 0.1)
        return self.first(x)


class Normalizer(nn.Module):
    """The mean of what came, and how much that was, as agents keep it of what they observe."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean += (x.detach().mean(0) - self.mean) / self.count
        return self.first(x)


@pytest.mark.parametrize("ends_by", ["budget", "finish"])
@pytest.mark.parametrize(
    "layers",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        Codebook,
        Normalizer,
    ],
    ids=["batch norm", "codebook", "normalizer"],
)
def test_buffers_are_those_of_the_end(serve, layers, ends_by: str) -> None:
    """Though they are sent so seldom that no ordinary round has asked for them."""
    sync = EXACT | {"companions_every": 1000}
    shard = serve(settings_with(run={"tokens": 0 if ends_by == "finish" else 6400}, sync=sync))
    torch.manual_seed(0)
    model = layers()
    learner = diloco_worker.join(shard.address, model, wait_s=20.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: dict[str, Tensor] = {}

    def is_over() -> bool:
        model(torch.randn(64, 4) + 3.0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.update({name: buffer.clone() for name, buffer in model.named_buffers()})
        learner.step(samples=64)
        return learner.done or (ends_by == "finish" and learner.inner_step == 100)

    until(is_over, "the end")
    assert learner.finish()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            assert float((buffer - seen[name]).norm()) < 0.5 * float(seen[name].norm()), name
    buffers = [f.version for f in shard.core.fragments.values() if f.fragment.kind == "buffer"]
    assert buffers == [1] * len(buffers)


def activations(run: Run) -> tuple[Tensor, Tensor]:
    """Mean and variance [6] of what enters the normalization, over 40 batches of the run's own data."""
    with torch.no_grad():
        entering = torch.cat([run.model.first(run.batch()[:, run.model.order]) for _ in range(40)])
    return entering.mean(0), entering.var(0)


def test_a_learner_that_comes_later_begins_with_the_statistics_of_the_run(serve) -> None:
    shard = serve(settings_with(sync=EXACT))
    first = Run(shard.address, "a", shift=3.0)
    with first.learner:
        while not int(shard.loop.look(lambda: min(s.version for s in shard.core.fragments.values()))):
            first.step()
        late = Run(shard.address, "b")
        with late.learner:
            assert float(late.model.norm.running_mean.abs().max()) > 0.1
            with late.learner.global_values():
                late.model(torch.full((16, 4), 100.0))
            assert float(late.model.norm.running_mean.abs().max()) < 10, "undone"
