"""Schedule-free SGD as published (Defazio and others): the parameters are y in training, and x after eval()."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco


class ScheduleFreeSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})
        for p in self.param_groups[0]["params"]:
            self.state[p]["z"] = p.detach().clone()

    @torch.no_grad()
    def eval(self):
        for p in self.param_groups[0]["params"]:
            p.lerp_(self.state[p]["z"], 1 - 1 / self.param_groups[0]["beta"])

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        group["k"] += 1
        rate, share = group["lr"] * min(1, group["k"] / 100), 1 / group["k"]
        for p in group["params"]:
            p.lerp_(self.state[p]["z"], share)
            p.add_(p.grad, alpha=rate * (group["beta"] * (1 - share) - 1))
            self.state[p]["z"].sub_(p.grad, alpha=rate)


def samples(count, generator=None):
    hidden = torch.Generator().manual_seed(0)
    first, second = torch.randn(12, 16, generator=hidden), torch.randn(16, 4, generator=hidden)
    x = torch.randn(count, 12, generator=generator)
    return x, (torch.sin(x @ first / 4) @ second).argmax(1)


def make_model():
    return nn.Sequential(nn.Linear(12, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4))


@torch.no_grad()
def evaluate(model):
    x, y = samples(8000, torch.Generator().manual_seed(1))
    return (model(x).argmax(1) == y).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 1000, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    optimizer = ScheduleFreeSGD(model.parameters(), lr=0.5)
    name = os.environ["LEARNER"]  # diloco
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=name, masters=optimizer)  # diloco
    torch.manual_seed(learner.seed)  # diloco
    for _ in range(args.steps):
        x, y = samples(args.batch)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(samples=args.batch, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    optimizer.eval()
    print(json.dumps({"accuracy": evaluate(model)}))


if __name__ == "__main__":
    main()
