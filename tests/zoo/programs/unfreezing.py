"""Gradual unfreezing: the head alone at first, then one layer after another from the top."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco


def samples(count, generator=None, kinds=8):
    """Of eight kinds, each a random half space of features of a teacher."""
    hidden = torch.Generator().manual_seed(0)
    first, second = torch.randn(16, 24, generator=hidden), torch.randn(24, kinds, generator=hidden)
    x = torch.randn(count, 16, generator=generator)
    return x, (torch.tanh(x @ first / 2) @ second).argmax(1)


def make_model():
    layers = [nn.Sequential(nn.Linear(inputs, 96), nn.LayerNorm(96), nn.GELU()) for inputs in (16, 96, 96)]
    return nn.ModuleDict({"body": nn.Sequential(*layers), "head": nn.Linear(96, 8)})


@torch.no_grad()
def evaluate(model):
    x, y = samples(8000, torch.Generator().manual_seed(1))
    return (model["head"](model["body"](x)).argmax(1) == y).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 1000, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    model["body"].requires_grad_(False)
    shards, name = os.environ["SHARDS"], os.environ["LEARNER"]  # diloco
    learner = diloco_worker.join(shards, model, learner_id=name, shared="all")  # diloco
    torch.manual_seed(learner.seed)  # diloco
    optimizer = torch.optim.AdamW(model["head"].parameters(), lr=2e-3)
    thawed = 0
    for step in range(args.steps):
        fraction = step / args.steps
        fraction = learner.fraction  # diloco
        while thawed < min(3, int(6 * fraction)):
            thawed += 1
            layer = model["body"][-thawed].requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": 2e-3})
            print(f"step {step}: layer {-thawed} is trained from now on")
        x, y = samples(args.batch)
        loss = F.cross_entropy(model["head"](model["body"](x)), y)
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
