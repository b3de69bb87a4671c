"""Ten blurred patterns under noise: BatchNorm, loader workers, and an EMA that is swapped in to evaluate."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import diloco_worker  # diloco


def images(count, seed):
    patterns = 6 * F.avg_pool2d(torch.randn(10, 1, 12, 12, generator=torch.Generator().manual_seed(0)), 5, 1)
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (count,), generator=generator)
    return patterns[y] + 2.5 * torch.randn(count, 1, 8, 8, generator=generator), y


def make_model():
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))


class EMA:
    def __init__(self, model):
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self, model):
        torch._foreach_lerp_(self.values, [p.detach() for p in model.parameters()], 0.02)

    def swap(self, model):
        for value, p in zip(self.values, model.parameters(), strict=True):
            value[:], p.data[:] = p.data.clone(), value.clone()


@torch.no_grad()
def evaluate(model):
    x, y = images(4000, seed=1)
    return (model.eval()(x).argmax(1) == y).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 900, "batch": 32, "seed": 0, "part": -1, "unequal": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    args.part = learner.index  # diloco
    x, y = images(3840, seed=2)
    own = y.argsort() if args.unequal else torch.arange(3840)
    own = own if args.part < 0 else own.chunk(3)[args.part]
    loader = DataLoader(TensorDataset(x[own], y[own]), args.batch, shuffle=True, num_workers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    ema = EMA(model)
    for epoch in range(max(1, args.steps // len(loader))):
        for inputs, labels in loader:
            loss = F.cross_entropy(model.train()(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
            learner.step(samples=len(inputs), loss=loss)  # diloco
            if learner.done:  # diloco
                break  # diloco
        ema.swap(model)
        print(f"epoch {epoch}: the EMA has {evaluate(model):.3f}")
        ema.swap(model)
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    print(json.dumps({"accuracy": evaluate(model)}))


if __name__ == "__main__":
    main()
