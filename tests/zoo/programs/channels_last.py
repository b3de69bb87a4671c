"""A residual convolutional network whose weights and images have the channels last."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco


def images(count, seed):
    """Ten textures in three colours under noise."""
    patterns = 5 * F.avg_pool2d(torch.randn(10, 3, 12, 12, generator=torch.Generator().manual_seed(0)), 5, 1)
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (count,), generator=generator)
    x = patterns[y] + 4 * torch.randn(count, 3, 8, 8, generator=generator)
    return x.contiguous(memory_format=torch.channels_last), y


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm_2(self.second(F.relu(self.norm_1(self.first(x))))))


def make_model():
    stem = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*stem, Block(16), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    return model.to(memory_format=torch.channels_last)


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
    torch.manual_seed(learner.seed)  # diloco
    x, y = images(6000, seed=2)
    own = y.argsort() if args.unequal else torch.arange(6000)
    own = own if args.part < 0 else own.chunk(3)[args.part]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(args.steps):
        rows = own[torch.randint(len(own), (args.batch,))]
        loss = F.cross_entropy(model.train()(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(samples=args.batch, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    learner.finish()  # diloco
    print(json.dumps({"accuracy": evaluate(model)}))


if __name__ == "__main__":
    main()
