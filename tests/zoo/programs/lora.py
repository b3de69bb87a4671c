"""LoRA by peft: adapters and a new head on a model whose weights stay as they are."""

import argparse
import json
import os

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco


def sentences(count, generator=None):
    """Sixteen tokens; the class is whether more of them are small than large, or about as many."""
    x = torch.randint(64, (count, 16), generator=generator)
    small = (x < 20).sum(1) - (x > 43).sum(1)
    return x, (small > 1).long() + (small >= -1).long()


class Reader(nn.Module):
    """As it comes from elsewhere: its weights are those of a file, here those of a seed."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.q_proj, self.v_proj, self.out = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.out(F.scaled_dot_product_attention(self.q_proj(x), x, self.v_proj(x)))
        return self.head((x + self.down(F.gelu(self.up(x)))).mean(1))


def make_model():
    torch.manual_seed(7)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up", "down"], modules_to_save=["head"])
    return get_peft_model(Reader(), config)


@torch.no_grad()
def evaluate(model):
    x, y = sentences(8000, torch.Generator().manual_seed(1))
    return (model.eval()(x).argmax(1) == y).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 800, "batch": 32, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    model = make_model()
    torch.manual_seed(args.seed)
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    torch.manual_seed(learner.seed)  # diloco
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    for step in range(args.steps):
        x, y = sentences(args.batch)
        loss = F.cross_entropy(model(x), y)
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
