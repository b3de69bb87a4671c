"""A recommender: sparse tables of users and items, with an optimizer of their own."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco

USERS, ITEMS = 100, 80


def clicks(count, seed):
    """Who clicked on what, by tastes that nobody sees."""
    hidden = torch.Generator().manual_seed(0)
    users, items = torch.randn(USERS, 4, generator=hidden), torch.randn(ITEMS, 4, generator=hidden)
    generator = torch.Generator().manual_seed(seed)
    u, i = torch.randint(USERS, (count,), generator=generator), torch.randint(ITEMS, (count,), generator=generator)
    return u, i, torch.bernoulli(torch.sigmoid(1.5 * (users[u] * items[i]).sum(1)), generator=generator)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 8, sparse=True), nn.Embedding(ITEMS, 8, sparse=True)
        self.top = nn.Sequential(nn.Linear(17, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        u, i = self.user(u), self.item(i)
        match = (u * i).sum(1, keepdim=True)
        return (match + self.top(torch.cat([u, i, match], 1)))[:, 0]


def make_model():
    return Recommender()


@torch.no_grad()
def evaluate(model):
    u, i, y = clicks(20_000, seed=1)
    return F.binary_cross_entropy_with_logits(model(u, i), y).item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 1000, "batch": 128, "seed": 0, "part": -1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    args.part = learner.index  # diloco
    torch.manual_seed(learner.seed)  # diloco
    data = clicks(30_000, seed=2)
    own = torch.arange(30_000) if args.part < 0 else torch.arange(30_000).chunk(3)[args.part]
    optimizers = [
        torch.optim.SparseAdam([*model.user.parameters(), *model.item.parameters()], lr=2e-2),
        torch.optim.Adam(model.top.parameters(), lr=2e-3),
    ]
    for _ in range(args.steps):
        rows = own[torch.randint(len(own), (args.batch,))]
        u, i, y = (column[rows] for column in data)
        loss = F.binary_cross_entropy_with_logits(model(u, i), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        learner.step(samples=args.batch, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    print(json.dumps({"loss": evaluate(model)}))


if __name__ == "__main__":
    main()
