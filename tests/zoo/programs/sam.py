"""Sharpness-aware minimisation: a step up, the gradient there, and the step down from where it was."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base.step()
        self.zero_grad()


def moons(count, generator=None):
    y = torch.randint(2, (count,), generator=generator)
    angle = 3.14159 * torch.rand(count, generator=generator) + 3.14159 * y
    x = torch.stack([angle.cos() + y, angle.sin() + 0.4 * y], 1)
    return x + 0.25 * torch.randn(count, 2, generator=generator), y


def make_model():
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


@torch.no_grad()
def evaluate(model):
    x, y = moons(20_000, torch.Generator().manual_seed(1))
    return F.cross_entropy(model(x), y).item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 800, "batch": 32, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    torch.manual_seed(learner.seed)  # diloco
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    for _ in range(args.steps):
        x, y = moons(args.batch)
        F.cross_entropy(model(x), y).backward()
        optimizer.first_step()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.second_step()
        learner.step(samples=args.batch, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    print(json.dumps({"loss": evaluate(model)}))


if __name__ == "__main__":
    main()
