"""A graph network of PyTorch Geometric: communities in a random graph, by full batches."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

import diloco_worker  # diloco

NODES, KINDS = 1200, 6


def graph():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(KINDS, (NODES,), generator=generator)
    likely = torch.where(y[:, None] == y, 0.012, 0.002)
    edges = (torch.rand(NODES, NODES, generator=generator) < likely).nonzero().T
    x = F.one_hot(y, KINDS) + 2.0 * torch.randn(NODES, KINDS, generator=generator)
    return x, torch.cat([edges, edges.flip(0)], 1), y


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(KINDS, 32), GCNConv(32, KINDS)

    def forward(self, x, edges):
        return self.second(F.dropout(self.first(x, edges).relu(), 0.3, self.training), edges)


def make_model():
    return Network()


@torch.no_grad()
def evaluate(model):
    x, edges, y = graph()
    return (model.eval()(x, edges).argmax(1) == y)[NODES // 2 :].float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 400, "batch": 60, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model, (x, edges, y) = make_model(), graph()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    torch.manual_seed(learner.seed)  # diloco
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    for _ in range(args.steps):
        rows = torch.randint(NODES // 2, (args.batch,))
        loss = F.cross_entropy(model.train()(x, edges)[rows], y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(samples=len(rows), loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    print(json.dumps({"accuracy": evaluate(model)}))


if __name__ == "__main__":
    main()
