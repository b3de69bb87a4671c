"""Weights in bfloat16, and masters in float32 that the optimizer steps on and rounds into them."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco


class MasterWeights:
    """As apex and many a loop have it: AdamW on float32 copies of the parameters."""

    def __init__(self, params, **options):
        self.params = list(params)
        self.masters = [p.detach().float().requires_grad_() for p in self.params]
        self.base = torch.optim.AdamW(self.masters, **options)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = p.grad.float()
        self.base.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)


def digits(count, generator=None):
    """A number from 0 to 99 as two noisy patterns, and whether the two digits differ by how much."""
    patterns = torch.randn(10, 24, generator=torch.Generator().manual_seed(0))
    two = torch.randint(10, (2, count), generator=generator)
    x = patterns[two].transpose(0, 1).flatten(1) + 0.7 * torch.randn(count, 48, generator=generator)
    return x.bfloat16(), (two[0] - two[1]) % 10


def make_model():
    layers = [nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers).bfloat16()


@torch.no_grad()
def evaluate(model):
    x, y = digits(8000, torch.Generator().manual_seed(1))
    return (model(x).argmax(1) == y).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 800, "batch": 32, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    optimizer = MasterWeights(model.parameters(), lr=1e-3)
    masters, name = list(zip(model.parameters(), optimizer.masters, strict=True)), os.environ["LEARNER"]  # diloco
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=name, masters=masters)  # diloco
    torch.manual_seed(learner.seed)  # diloco
    for _ in range(args.steps):
        x, y = digits(args.batch)
        loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(samples=args.batch, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    print(json.dumps({"accuracy": evaluate(model)}))


if __name__ == "__main__":
    main()
