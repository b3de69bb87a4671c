"""A residual network for regression, under torch.compile."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco


def samples(count, generator=None):
    x = 2 * torch.rand(count, 8, generator=generator) - 1
    y = (3 * x[:, 0] * x[:, 1]).sin() + x[:, 2:5].square().sum(1) - (x[:, 5:] > 0).float().sum(1)
    return x, y[:, None] + 0.05 * torch.randn(count, 1, generator=generator)


def make_model():
    def block():
        return [nn.Linear(96, 96), nn.LayerNorm(96), nn.GELU()]

    return nn.Sequential(nn.Linear(8, 96), nn.GELU(), *block(), *block(), nn.Linear(96, 1))


@torch.no_grad()
def evaluate(model):
    x, y = samples(10_000, torch.Generator().manual_seed(1))
    return F.mse_loss(model(x), y).item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 800, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    torch.manual_seed(learner.seed)  # diloco
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(args.steps):
        x, y = samples(args.batch)
        loss = F.mse_loss(compiled(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(samples=args.batch, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    learner.finish()  # diloco
    print(json.dumps({"mse": evaluate(model)}))


if __name__ == "__main__":
    main()
