"""Contrastive learning with a momentum encoder and a queue of negatives (MoCo)."""

import argparse
import copy
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco


def images(count, generator=None):
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    y = torch.randint(10, (count,), generator=generator)
    return patterns[y] + 2 * torch.randn(count, 64, generator=generator), y


def augment(x):
    return (x + 0.8 * torch.randn(x.shape)) * (torch.rand(x.shape) > 0.3) * (0.5 + torch.rand(len(x), 1))


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder_q = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(32, 512), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x_q, x_k):
        q = F.normalize(self.encoder_q(x_q), dim=1)
        with torch.no_grad():
            for p_q, p_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                p_k.data = p_k.data * 0.99 + p_q.data * 0.01
            k = F.normalize(self.encoder_k(x_k), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.2
        self.queue[:, (torch.arange(len(k)) + self.queue_ptr) % 512] = k.T
        self.queue_ptr[0] = (self.queue_ptr + len(k)) % 512
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


make_model = MoCo


@torch.no_grad()
def evaluate(model):
    x, y = images(6000, torch.Generator().manual_seed(1))
    known, tested = F.normalize(model.encoder_q(x), dim=1).split((2000, 4000))
    return (y[(tested @ known.T).topk(50, 1)[1]].mode(1)[0] == y[2000:]).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 700, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    private, name = ["queue*", "encoder_k.*"], os.environ["LEARNER"]  # diloco
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=name, private=private)  # diloco
    torch.manual_seed(learner.seed)  # diloco
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for _ in range(args.steps):
        x = images(args.batch)[0]
        loss = model(augment(x), augment(x))
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
