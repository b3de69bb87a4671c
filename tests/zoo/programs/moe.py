"""A mixture of experts: two of eight for each sample, with a loss that balances them."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco


def samples(count, generator=None):
    """Each region of the plane has a function of its own."""
    x = 4 * torch.rand(count, 2, generator=generator) - 2
    region = (x > 0).long() @ torch.tensor([1, 2])
    all_of_them = torch.stack([x.prod(1), (3 * x[:, 0]).sin(), x.square().sum(1) - 2, (2 * x[:, 1]).cos()], 1)
    return x, all_of_them.gather(1, region[:, None]) + 0.05 * torch.randn(count, 1, generator=generator)


class MoE(nn.Module):
    def __init__(self, width=32, experts=8, active=2):
        super().__init__()
        self.active = active
        self.embed, self.head = nn.Linear(2, width), nn.Linear(width, 1)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        shares = self.gate(x).softmax(1)
        weights, chosen = shares.topk(self.active, 1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, rank = (chosen == index).nonzero(as_tuple=True)
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows, rank, None])
        used = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        return self.head(x + y), len(self.experts) * (used * shares.mean(0)).sum()


def make_model():
    return MoE()


@torch.no_grad()
def evaluate(model):
    x, y = samples(10_000, torch.Generator().manual_seed(1))
    return F.mse_loss(model(x)[0], y).item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 800, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    torch.manual_seed(learner.seed)  # diloco
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(args.steps):
        x, y = samples(args.batch)
        guess, balance = model(x)
        loss = F.mse_loss(guess, y) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(samples=args.batch, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    print(json.dumps({"mse": evaluate(model)}))


if __name__ == "__main__":
    main()
