"""A graph network that finds the communities of a graph from a few labelled nodes."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco

NODES, CLASSES = 600, 5


def graph():
    """Normalised edges, features that say little, and labels: nodes of one class are linked more often."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (NODES,), generator=generator)
    chance = torch.where(y[:, None] == y, 0.03, 0.012)
    edges = (torch.rand(NODES, NODES, generator=generator) < chance).float().triu(1)
    edges = edges + edges.T + torch.eye(NODES)
    norm = edges.sum(1).rsqrt()
    x = torch.randn(CLASSES, 32, generator=generator)[y] * 0.4 + torch.randn(NODES, 32, generator=generator)
    return norm[:, None] * edges * norm, x, y


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, edges, x):
        x = F.dropout(F.relu(edges @ self.first(x)), 0.5, self.training)
        return edges @ self.second(x)


def make_model():
    return GCN()


@torch.no_grad()
def evaluate(model):
    """On the half of the nodes whose label nobody was told."""
    edges, x, y = graph()
    return F.cross_entropy(model.eval()(edges, x)[NODES // 2 :], y[NODES // 2 :]).item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 600, "batch": 32, "seed": 0, "part": -1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    args.part = learner.index  # diloco
    torch.manual_seed(learner.seed)  # diloco
    edges, x, y = graph()
    told = torch.arange(NODES // 2)
    told = told if args.part < 0 else told.chunk(3)[args.part]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    for step in range(args.steps):
        nodes = told[torch.randint(len(told), (args.batch,))]
        loss = F.cross_entropy(model.train()(edges, x)[nodes], y[nodes])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(samples=args.batch, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    learner.finish()  # diloco
    print(json.dumps({"loss": evaluate(model)}))


if __name__ == "__main__":
    main()
