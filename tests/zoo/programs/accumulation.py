"""A small GPT of characters: autocast to bfloat16, gradients accumulated and clipped, and a cosine schedule."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco

TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.words, self.places = nn.Embedding(128, width), nn.Embedding(32, width)
        self.blocks = nn.Sequential(Block(width), Block(width), nn.LayerNorm(width), nn.Linear(width, 128))

    def forward(self, x):
        return self.blocks(self.words(x) + self.places.weight)


def make_model():
    return GPT()


@torch.no_grad()
def evaluate(model):
    x = TEXT[-250 * 33 :].view(250, 33)
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 500, "batch": 16, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    torch.manual_seed(learner.seed)  # diloco
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    schedule = diloco_worker.ProgressLR(optimizer, learner, "cosine", final=0.0)  # diloco
    for _ in range(args.steps):
        for _ in range(2):
            rows = torch.randint(len(TEXT) - 251 * 33, (args.batch // 2, 1)) + torch.arange(33)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(TEXT[rows[:, :-1]]).flatten(0, 1), TEXT[rows[:, 1:]].flatten()) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        learner.step(tokens=args.batch * 32, loss=2 * loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    print(json.dumps({"loss": evaluate(model)}))


if __name__ == "__main__":
    main()
